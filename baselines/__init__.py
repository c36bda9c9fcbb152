"""Methods to compare with, one file each. Every module here is imported when a method is looked up by name."""
