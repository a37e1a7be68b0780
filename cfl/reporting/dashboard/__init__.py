"""Create a workspace and a report at wandb whose panels compare runs."""
