"""Write the rows of a store as files of other libraries."""
