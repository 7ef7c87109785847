"""The commands that are more than a few lines; `agent.cli` names them all."""
