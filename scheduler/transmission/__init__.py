"""The form, order and pace of gradient transfers, decided from measured transfers."""
