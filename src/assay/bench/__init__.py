"""The machine that runs claims: vocabulary, runner, executors, store, verdict, race, report."""
