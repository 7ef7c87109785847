"""The operator's page: live KV blocks and what the numbers about them mean."""
