"""What users touch: the command line and the client."""
