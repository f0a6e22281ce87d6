"""The watchdog: notices that an engine hangs or has died, keeps the evidence, and finds out whether the patch is to
blame.
"""
