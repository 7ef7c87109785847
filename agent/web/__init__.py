"""The HTTP side of the agent: routes, who may change something, and how samples look on the wire."""
