"""What a run is trained and evaluated by: losses, matrices over tasks and the figures computed from them."""
