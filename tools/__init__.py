"""Tools of those who develop kaiten; no service imports them and no wheel holds them."""
