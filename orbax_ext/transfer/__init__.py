"""Reads arrays and runs programs: the only room that does either."""
