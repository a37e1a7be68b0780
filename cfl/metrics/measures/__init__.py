"""The measures, one in a file each. They do without torchmetrics, so that comparisons do not wait for it."""
