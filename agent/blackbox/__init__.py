"""What is kept of an engine that ended, and what goes into a bug report: no request id, and no secret."""
