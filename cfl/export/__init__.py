"""A trained model as a file for programs that know nothing of this one, with a card that says what it is."""
