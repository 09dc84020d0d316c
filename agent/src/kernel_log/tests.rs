//! The log as a file, a pipe and a device; each change is made by the test and seen through the news.

use super::*;
use rustix::fs::{CWD, FileType, Mode, mknodat};
use std::fs::File;
use std::io::Write;
use std::path::Path;
use tempfile::TempDir;
use tokio::time::timeout;

const PATIENCE: Duration = Duration::from_secs(10);

struct Watched {
    folder: TempDir,
    log: Option<KernelLog>,
    news: mpsc::Receiver<LogNews>,
}

impl Watched {
    fn path(&self) -> PathBuf {
        self.folder.path().join("kmsg")
    }

    fn begin(folder: TempDir, start: LogStart) -> Self {
        let (news_in, news) = mpsc::channel(16);
        let log = KernelLog::start(folder.path().join("kmsg"), start, news_in).unwrap();
        Self { folder, log: Some(log), news }
    }

    /// The next news but that there is no more to read now.
    async fn next(&mut self) -> LogNews {
        loop {
            let news = timeout(PATIENCE, self.news.recv()).await.expect("no news").expect("the thread ended");
            if news != LogNews::CaughtUp {
                return news;
            }
        }
    }

    async fn opened(&mut self) {
        assert_eq!(self.next().await, LogNews::Opened);
    }

    /// The next line's text, and where it ends.
    async fn line(&mut self) -> (String, Cursor) {
        match self.next().await {
            LogNews::Line { cursor, at_us: _, text } => (text, cursor),
            other => panic!("{other:?} is no line"),
        }
    }

    fn append(&self, text: &[u8]) {
        let file = File::options().append(true).create(true).open(self.path());
        file.unwrap().write_all(text).unwrap();
    }
}

fn folder_with(text: &str) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("kmsg"), text).unwrap();
    folder
}

fn xid(number: u32) -> String {
    format!("NVRM: Xid (PCI:0000:3b:00): {number}, x")
}

#[tokio::test]
async fn a_file_is_followed_from_where_it_is_asked() {
    let text = format!("4,1,10,-;{}\n6,2,11,-;usb 1-1: new\n4,3,12,-;{}\n", xid(1), xid(2));
    let mut log = Watched::begin(folder_with(&text), LogStart::Beginning);
    log.opened().await;
    let inode = std::os::unix::fs::MetadataExt::ino(&fs::metadata(log.path()).unwrap());
    let after_first = Cursor::File { inode, offset: 10 + xid(1).len() as u64 };
    let first = LogNews::Line { cursor: after_first.clone(), at_us: Some(10), text: xid(1) };
    assert_eq!(log.next().await, first);
    assert_eq!(log.line().await.0, xid(2));
    // Half a line is none; appended to, it is one.
    log.append(b"4,4,13,-;NVRM: Xid (PCI:0000:");
    log.append(b"3b:00): 3, x\nplain ");
    assert_eq!(log.line().await.0, xid(3));
    log.append(format!("{}\n", xid(4)).as_bytes());
    assert_eq!(log.line().await.0, format!("plain {}", xid(4)));

    let Watched { folder, log: _, news: _ } = log;
    let mut log = Watched::begin(folder, LogStart::After(after_first));
    log.opened().await;
    assert_eq!(log.line().await.0, xid(2), "a restarted agent goes on where it was");

    let Watched { folder, log: _, news: _ } = log;
    let mut log = Watched::begin(folder, LogStart::End);
    log.opened().await;
    log.append(format!("{}\n", xid(5)).as_bytes());
    assert_eq!(log.line().await.0, xid(5), "nothing of before");
}

#[tokio::test]
async fn a_file_that_is_cut_off_or_replaced_is_read_from_its_start() {
    let mut log = Watched::begin(folder_with("a long first line that is not shown\n"), LogStart::End);
    log.opened().await;
    fs::write(log.path(), format!("{}\n", xid(1))).unwrap();
    log.opened().await;
    assert_eq!(log.line().await.0, xid(1));

    let other = log.folder.path().join("other");
    fs::write(&other, format!("{}\n{}\n", xid(2), xid(3))).unwrap();
    fs::rename(&other, log.path()).unwrap();
    log.opened().await;
    assert_eq!(log.line().await.0, xid(2));
    let (text, cursor) = log.line().await;
    assert_eq!(text, xid(3));

    // A cursor of another file means the beginning.
    let Watched { folder, log: _, news: _ } = log;
    fs::write(folder.path().join("other"), format!("{}\n", xid(4))).unwrap();
    fs::rename(folder.path().join("other"), folder.path().join("kmsg")).unwrap();
    let mut log = Watched::begin(folder, LogStart::After(cursor));
    log.opened().await;
    assert_eq!(log.line().await.0, xid(4));
}

#[tokio::test]
async fn garbage_and_endless_lines_are_survived() {
    let mut log = Watched::begin(folder_with(""), LogStart::End);
    log.opened().await;
    log.append(b"\0\xff\xfe\n\n;\n,,,;\n");
    log.append(&vec![b'x'; 3 << 20]);
    log.append(format!("NVRM: Xid far behind\n{}\n", xid(1)).as_bytes());
    let (text, cursor) = log.line().await;
    assert_eq!(text, xid(1));
    let length = fs::metadata(log.path()).unwrap().len();
    assert!(matches!(cursor, Cursor::File { offset, .. } if offset == length));
    log.append(format!("{}\u{fffd} {}\n", xid(2), "y".repeat(20_000)).as_bytes());
    let text = log.line().await.0;
    assert!(text.starts_with(&xid(2)) && text.len() <= record::TEXT_LIMIT);
}

#[tokio::test]
async fn a_log_that_is_missing_is_said_once_and_waited_for() {
    let mut log = Watched::begin(tempfile::tempdir().unwrap(), LogStart::End);
    let LogNews::Unreadable { why } = log.next().await else {
        panic!("a missing file was opened");
    };
    for advice in ["CAP_SYSLOG", "--kmsg", "No such file"] {
        assert!(why.contains(advice), "{why}");
    }
    // Past one retry, which says nothing again.
    tokio::time::sleep(RETRY + Duration::from_millis(500)).await;
    log.append(format!("{}\n", xid(1)).as_bytes());
    log.opened().await;
    assert_eq!(log.line().await.0, xid(1), "all of a file that came later is new");
}

#[tokio::test]
async fn what_is_no_log_is_unreadable() {
    for path in ["/dev/null", "/proc"] {
        let (news_in, mut news) = mpsc::channel(16);
        let _log = KernelLog::start(path.into(), LogStart::Beginning, news_in).unwrap();
        let told = timeout(PATIENCE, news.recv()).await.unwrap();
        assert!(matches!(told, Some(LogNews::Unreadable { .. })), "{path}: {told:?}");
    }
}

#[tokio::test]
async fn a_pipe_outlives_its_writers() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("kmsg");
    mknodat(CWD, &path, FileType::Fifo, Mode::from_raw_mode(0o600), 0).unwrap();
    let mut log = Watched::begin(folder, LogStart::Beginning);
    log.opened().await;
    for number in 1..=3 {
        log.append(format!("4,1,2,-;{}\n", xid(number)).as_bytes());
        assert_eq!(log.line().await.0, xid(number));
    }
}

#[tokio::test]
async fn the_kernels_own_log_opens_or_says_why_not() {
    let (news_in, mut news) = mpsc::channel(16);
    let path = Path::new("/dev/kmsg");
    let readable = match File::open(path).and_then(|mut log| io::Read::read(&mut log, &mut [0; 16 << 10])) {
        Ok(0) => false,
        Ok(_) => true,
        Err(e) => e.raw_os_error() == Some(rustix::io::Errno::PIPE.raw_os_error()),
    };
    let _log = KernelLog::start(path.to_owned(), LogStart::Beginning, news_in).unwrap();
    let told = timeout(PATIENCE, news.recv()).await.unwrap().unwrap();
    assert_eq!(matches!(told, LogNews::Opened), readable, "{told:?}");
}

#[tokio::test]
async fn the_thread_ends_with_its_owner() {
    let mut log = Watched::begin(folder_with(""), LogStart::End);
    log.opened().await;
    assert_eq!(log.news.recv().await, Some(LogNews::CaughtUp));
    log.log = None;
    assert_eq!(timeout(PATIENCE, log.news.recv()).await.expect("it goes on"), None);
}
