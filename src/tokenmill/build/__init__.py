"""Build stores: recipe, plan, executors, pipeline, commit."""
