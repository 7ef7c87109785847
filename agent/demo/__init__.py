"""`kvatlas demo`: two engines, an agent and a dashboard as children, and what is shown meanwhile."""
