"""The measures, one per file. They do not import torchmetrics, so that comparisons start fast."""
