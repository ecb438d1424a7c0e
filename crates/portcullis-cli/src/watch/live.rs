//! The kernel's events as a text that comes while it is read.

use std::io::{self, Read};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use portcullis_trace::ring::Merge;

use crate::interrupt;
use crate::record::session::Session;

/// What remains to be ended, when the text has.
pub type Shared = Arc<Mutex<Option<Session>>>;

/// A text that ends when it is time, or by Ctrl-C.
pub struct Live {
    session: Shared,
    merge: Merge,
    end: Option<Instant>,
    text: Vec<u8>,
    /// So much of it was read.
    at: usize,
    ended: bool,
    /// Since when the text is being read.
    since: Instant,
}

/// A reader that takes longer over a text cannot keep up: what has come meanwhile is passed over, and counts as lost.
const LATE: Duration = Duration::from_millis(500);

impl Live {
    pub fn new(session: Session, end: Option<Instant>) -> (Self, Shared) {
        let merge = Merge::new(session.events.formats.clone());
        let session = Arc::new(Mutex::new(Some(session)));
        let text = b"# tracer: nop\n".to_vec();
        let live = Self {
            session: Arc::clone(&session),
            merge,
            end,
            text,
            at: 0,
            ended: false,
            since: Instant::now(),
        };
        (live, session)
    }

    /// Waits, and reads the buffers once.
    fn more(&mut self) -> io::Result<()> {
        let mut session = self.session.lock().map_err(|_| io::Error::other("another thread has failed"))?;
        let Some(session) = session.as_mut() else {
            self.ended = true;
            return Ok(());
        };
        if self.since.elapsed() > LATE {
            let passed_over = session.round(|_| Ok(()))?;
            self.merge.skip(passed_over.events);
        }
        session.pause(self.end);
        self.ended = interrupt::stopped() || self.end.is_some_and(|end| Instant::now() >= end);
        let Self { merge, text, .. } = self;
        if let Some(now_ns) = session.now_ns() {
            merge.tick(now_ns);
        }
        session.round(|pages| {
            pages.each().for_each(|(cpu, page)| merge.page(cpu, page));
            Ok(())
        })?;
        if self.ended {
            merge.finish(text);
        } else {
            merge.round(text);
        }
        Ok(())
    }
}

impl Read for Live {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        while self.at == self.text.len() {
            if self.ended {
                return Ok(0);
            }
            self.text.clear();
            self.at = 0;
            self.more()?;
            self.since = Instant::now();
        }
        let mut rest = self.text.get(self.at..).unwrap_or(&[]);
        let read = rest.read(buf)?;
        self.at += read;
        Ok(read)
    }
}
