"""Fakes and small worlds that tests share; no tests here."""
