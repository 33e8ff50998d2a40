"""The one exception that stands for a person's mistake."""


class UserError(Exception):
    """What a person did wrong, in one line: what, where, how to mend it.

    Scripts print the message after "error:" and exit with code 2, without a traceback.
    """
