"""The operator's page: draws what the agent says about each KV cache pool, and admits what it does not know."""
