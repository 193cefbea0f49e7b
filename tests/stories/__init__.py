"""The five systems whose users have to feel at home: each one's whole story, on the real parts."""
