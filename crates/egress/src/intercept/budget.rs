//! How much memory all intercepted connections of a session may use.
//!
//! Owns two sums. *Room* is asked for before something is made that keeps buffers as long as it lives: a
//! guest's connection, one to a destination, a large head, a tunnel; when there is none left, the new one is
//! refused, and what there is goes on. *Held* is what passes: bytes of bodies between being read from the
//! one side and written to the other. When much is held, a body whose bytes are not taken gets no more until
//! they are, so a slow reader slows its own sender and nobody else. (Each body for itself: a stream of HTTP/2
//! that its reader lets wait must not stop the others of its connection.) Invariant: whatever guests and
//! destinations do, interception stays below [`MOST_ROOM`], in which there is a frame for each body, plus
//! [`MOST_HELD`] and the bodies that are signed ([`super::sign`]); together they fit into a shim's memory.
//!
//! Used by everything in [`super`] that keeps bytes.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Waker};

use bytes::Bytes;

/// Most room of all connections together.
pub(super) const MOST_ROOM: usize = 272 << 20;
/// Bytes of bodies that may be under way before each of them gets only one frame at a time.
pub(super) const MOST_HELD: usize = 32 << 20;
/// What is read from either side at once, so also the longest frame of HTTP/1.
pub(super) const FRAME: usize = 16 * 1024;
/// What TLS may keep for a side that does not take it: two records.
pub(super) const TLS_KEPT: usize = 32 * 1024;

/// A guest's connection: TLS in both directions, the scanner, the parser, a frame.
pub(super) const GUEST: usize = 72 * 1024;
/// A request of HTTP/2, which many of one connection may be under way: a frame in each direction.
pub(super) const REQUEST: usize = 2 * FRAME;
/// A connection to a destination.
pub(super) const UPSTREAM: usize = 56 * 1024;

/// The sums of a session. Frames carry it with them, wherever the HTTP library takes them.
#[derive(Debug, Clone, Default)]
pub(super) struct Budget(Arc<Sums>);

#[derive(Debug, Default)]
struct Sums {
    room: AtomicUsize,
    held: AtomicUsize,
}

/// Room that is taken, until this is dropped.
#[derive(Debug)]
pub(super) struct Room {
    sums: Arc<Sums>,
    bytes: usize,
}

impl Drop for Room {
    fn drop(&mut self) {
        self.sums.room.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

impl Budget {
    /// Takes room, if there is so much.
    pub(super) fn room(&self, bytes: usize) -> Option<Room> {
        let sums = &self.0;
        let fits = |taken: usize| taken.checked_add(bytes).filter(|sum| *sum <= MOST_ROOM);
        sums.room.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits).ok()?;
        Some(Room { sums: Arc::clone(sums), bytes })
    }

    /// Room for a connection with HTTP/2's window, which is the smaller the less there is: `windows` in
    /// falling order, each with its share of all room that may be taken before. Answers the window.
    pub(super) fn window(&self, base: usize, windows: &[(u32, usize)]) -> Option<(Room, u32)> {
        let taken = self.0.room.load(Ordering::Relaxed);
        let fitting = windows.iter().filter(|(_, percent)| taken / (MOST_ROOM / 100) < *percent);
        let room = |window: u32| Some((self.room(base + window as usize)?, window));
        fitting.into_iter().find_map(|(window, _)| room(*window))
    }

    /// Whether so much is under way that connections have to wait for their readers.
    fn pressed(&self) -> bool {
        self.0.held.load(Ordering::Relaxed) > MOST_HELD
    }

    /// Room and held, for tests.
    #[cfg(test)]
    pub(super) fn sums(&self) -> (usize, usize) {
        (self.0.room.load(Ordering::Relaxed), self.0.held.load(Ordering::Relaxed))
    }
}

/// What a body has under way.
#[derive(Debug)]
pub(super) struct Tab(Arc<Own>);

#[derive(Debug)]
struct Own {
    sums: Arc<Sums>,
    held: AtomicUsize,
    /// Who waits until all of it is taken.
    waiting: Mutex<Option<Waker>>,
}

impl Tab {
    pub(super) fn new(budget: &Budget) -> Self {
        let sums = Arc::clone(&budget.0);
        Self(Arc::new(Own { sums, held: AtomicUsize::new(0), waiting: Mutex::default() }))
    }

    /// Ready when the next frame may be read.
    pub(super) fn poll_next(&self, cx: &mut Context<'_>) -> Poll<()> {
        let own = &self.0;
        if own.held.load(Ordering::Relaxed) == 0 || !Budget(Arc::clone(&own.sums)).pressed() {
            return Poll::Ready(());
        }
        *own.waiting.lock().unwrap_or_else(PoisonError::into_inner) = Some(cx.waker().clone());
        Poll::Pending
    }

    /// Counts a frame until whoever has it drops it.
    pub(super) fn hold(&self, data: Bytes) -> Bytes {
        if data.is_empty() {
            return data;
        }
        let own = Arc::clone(&self.0);
        own.held.fetch_add(data.len(), Ordering::Relaxed);
        own.sums.held.fetch_add(data.len(), Ordering::Relaxed);
        Bytes::from_owner(Frame { data, own })
    }
}

/// A frame on its way.
struct Frame {
    data: Bytes,
    own: Arc<Own>,
}

impl AsRef<[u8]> for Frame {
    fn as_ref(&self) -> &[u8] {
        &self.data
    }
}

impl Drop for Frame {
    fn drop(&mut self) {
        let own = &self.own;
        own.sums.held.fetch_sub(self.data.len(), Ordering::Relaxed);
        if own.held.fetch_sub(self.data.len(), Ordering::Relaxed) == self.data.len() {
            let waiting = own.waiting.lock().unwrap_or_else(PoisonError::into_inner).take();
            if let Some(waiting) = waiting {
                waiting.wake();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;
    use std::task::Wake;

    use super::*;

    #[derive(Default)]
    struct Woken(AtomicBool);

    impl Wake for Woken {
        fn wake(self: Arc<Self>) {
            self.0.store(true, Ordering::Relaxed);
        }
    }

    #[test]
    fn room_is_given_until_there_is_none_and_comes_back() {
        let budget = Budget::default();
        let all = budget.room(MOST_ROOM).unwrap();
        assert!(budget.room(1).is_none());
        drop(all);
        let part = budget.room(MOST_ROOM - GUEST).unwrap();
        assert!(budget.room(GUEST + 1).is_none());
        let guest = budget.room(GUEST).unwrap();
        assert!(budget.room(usize::MAX).is_none());
        drop((part, guest));
        assert_eq!(budget.sums(), (0, 0));
    }

    #[test]
    fn windows_shrink_as_room_is_taken() {
        let budget = Budget::default();
        let windows = [(1 << 20, 10), (65_535, 100)];
        let (_one, window) = budget.window(UPSTREAM, &windows).unwrap();
        assert_eq!(window, 1 << 20);
        let _much = budget.room(MOST_ROOM / 5).unwrap();
        let (_two, window) = budget.window(UPSTREAM, &windows).unwrap();
        assert_eq!(window, 65_535);
        let _rest = budget.room(MOST_ROOM - budget.sums().0 - UPSTREAM).unwrap();
        assert!(budget.window(UPSTREAM, &windows).is_none());
    }

    #[test]
    fn under_pressure_a_body_waits_for_its_own_reader_only() {
        let budget = Budget::default();
        let (slow, other) = (Tab::new(&budget), Tab::new(&budget));
        let woken = Arc::new(Woken::default());
        let waker = Waker::from(Arc::clone(&woken));
        let mut cx = Context::from_waker(&waker);
        let frames: Vec<_> =
            (0..=MOST_HELD / FRAME).map(|_| slow.hold(vec![7; FRAME].into())).collect();
        assert!(budget.sums().1 > MOST_HELD);
        assert_eq!(frames[0][..3], [7, 7, 7]);
        assert!(slow.poll_next(&mut cx).is_pending());
        // Who has nothing under way gets a frame, and then waits as well.
        assert!(other.poll_next(&mut cx).is_ready());
        let one = other.hold(vec![1; 10].into());
        let part = one.slice(2..4);
        assert!(other.poll_next(&mut cx).is_pending());
        drop(one);
        assert!(!woken.0.load(Ordering::Relaxed), "a part of it is not taken yet");
        drop(part);
        assert!(woken.0.load(Ordering::Relaxed) && other.poll_next(&mut cx).is_ready());
        drop(frames);
        assert!(slow.poll_next(&mut cx).is_ready());
        assert_eq!(budget.sums(), (0, 0));
    }
}
