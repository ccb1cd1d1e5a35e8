"""The page that shows a store in a browser, as one file (`document`) or from a server (`serve`)."""
