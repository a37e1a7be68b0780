"""Reading run folders, drawing pictures and comparing runs."""
