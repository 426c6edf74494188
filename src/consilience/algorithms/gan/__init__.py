"""Methods that train generators and discriminators."""
