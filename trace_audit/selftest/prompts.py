"""What the selftest records: texts of one length, so that one page lies in every output."""

from __future__ import annotations

PROMPTS = (
    "The lighthouse keeper had not spoken to anyone since March,",
    "Photosynthesis is the process by which all green plants can",
    "The planets of the solar system, from the Sun outwards, are",
    "def fibonacci(n: int) -> int:  # the n-th number\n    if n <",
    "SELECT customer_id, COUNT(*) FROM orders WHERE year = 2023 ",
    "Dear Mr. Alvarez, thank you for your letter of the third of",
    "Lentil soup for four people. Ingredients: 250 g red lentils",
    "The committee has not yet decided whether the new bridge is",
    "Once upon a time, in a village between two rivers, a miller",
    "To change the tyre of a bicycle, first turn it upside down,",
    "The capital of Australia is not Sydney but Canberra because",
    "In 1905 a clerk of the Swiss patent office published papers",
    '{"name": "Ada", "born": 1815, "languages": ["English", "Fre',
    "The opposite of hot is cold. The opposite of tall is short.",
    "Breaking news: the city council has voted to close the old ",
    "Theorem. There are infinitely many primes. Proof. Assume we",
)
