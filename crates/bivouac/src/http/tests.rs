//! Whole exchanges through the router.
