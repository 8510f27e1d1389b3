"""What is around the stack: converters, benchmarks, checks, and the lab that its cluster tests run in."""
