"""Run folders, pictures and comparisons; nothing here trains or imports a model."""
