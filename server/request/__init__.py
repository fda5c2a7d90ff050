"""From a JSON body to what the engine is asked."""
