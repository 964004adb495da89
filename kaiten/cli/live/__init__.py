"""The live core at a terminal: `kaiten top`, `kaiten ps`, and a request's trace."""
