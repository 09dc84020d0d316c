//! Memory of the caller that an exchange moves bytes out of and into, with no copy between.

/// What [`crate::Group::exchange`] asks for memory, on the thread that called it: for each rank from its first byte on,
/// in order, and sometimes twice for the same.
///
/// Nothing of it is kept when the exchange returns, whatever comes of it. Of the bytes of all other operations the plane
/// sees itself that none changed on the way through a socket; of these, whoever lends them does.
pub trait Lent {
    /// How many bytes go to rank `to`.
    fn outgoing(&self, to: usize) -> usize;

    /// How many bytes come from rank `from`.
    fn incoming(&self, from: usize) -> usize;

    /// What goes to rank `to` from byte `at` on, as far as it lies side by side and is ready. Nothing means that the
    /// exchange cannot go on, and it fails.
    fn send(&mut self, to: usize, at: usize) -> &[u8];

    /// Where byte `at` and those after it of what comes from rank `from` go, as far as that lies side by side. Everything
    /// before `at` is there. Nothing means that the exchange cannot go on, and it fails.
    fn receive(&mut self, from: usize, at: usize) -> &mut [u8];
}
