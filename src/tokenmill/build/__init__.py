"""Recipe to plan, plan to slices on an executor, slices to one committed store."""
