"""Where notices go: Slack, Alertmanager, a generic webhook, the log."""
