"""When to relocate and when to move live blocks: decisions with reasons, their budgets, their record, their driver."""
