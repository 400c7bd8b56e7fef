//! Tests of the compiled policy.
