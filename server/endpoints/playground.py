"""The playground: one page at ``/`` and the files it asks for, all from the package.

The page is an ordinary client of the API: it needs no key to load, and what it does under ``/v1`` needs
the one the server wants.
"""

from server.http.pages import own_files, page_router

router = page_router("/", "playground", lambda: own_files("playground"))
