"""A cache that quantizes as tokens come in: coded tokens are only ever appended, the newest ones stay in 16 bit."""
