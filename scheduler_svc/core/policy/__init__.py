"""What an operator can choose: six plain functions, one file each, and sets of them with names."""
