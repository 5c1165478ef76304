"""Everything in Lockstep that knows somebody else's API.

Importing this package imports no engine and no trainer: each sub-package stands alone.
"""
