"""The one exception that means "the input is wrong", as opposed to "the program is"."""


class UserError(ValueError):
    """Wrong or missing input, told in one sentence: what is wrong, where, and how to fix it.

    Command lines print the sentence alone and exit with code 2.
    """
