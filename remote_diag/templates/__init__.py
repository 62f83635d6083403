"""What ``rdiag new-probe`` starts from: a real probe and its real test, kept in order by the project's own tests."""
