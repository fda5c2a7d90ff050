"""``python -m bench.soak``: a server under twice the load that it can serve, with clients who misbehave,
a drafter that breaks and an engine that is killed; and an account of every request.
"""
