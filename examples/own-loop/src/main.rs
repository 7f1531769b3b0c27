//! A Candle training loop of one's own.
fn main() {}
