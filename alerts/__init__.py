"""Alert rules and deliveries: what to say to whom, when, and when it is over."""
