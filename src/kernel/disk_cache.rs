//! [`DiskCache`]: NVRTC's results, kept on disk for later processes.
//!
//! There is one file per key. The key is everything that determines the compiler's output: text, headers, instances, options with the
//! architecture, PTX or machine code, and the compiler's version. A hash of the key names the file, and the file contains the whole key.
//!
//! | on disk | a lookup | afterwards |
//! |---|---|---|
//! | a whole entry of this very key | hits, and marks it as just used | kept |
//! | nothing; a link; a file truncated, changed, writable by others, of another format or key | misses | replaced, in one rename |
//! | a folder in the entry's place, a full disk, an unwritable folder | misses | unchanged; the result is used and not stored |
//! | a cache folder of another owner, or that others can write | is skipped | unchanged |
//!
//! 1. No state of the disk fails a compilation (`tests::whatever_is_in_its_place`, `tests::a_folder_that_cannot_be_used`).
//! 2. Only files that this user wrote completely are used: the GPU runs their contents, and the driver trusts them
//!    (`entry::tests::a_changed_byte_is_a_miss`, `tests::what_others_can_write`).
//! 3. The cache's own files take up at most [`LIMIT_BYTES`]; the least recently used go first, and no other file is removed
//!    (`tests::the_limit`).
//! 4. Two processes that write one key leave one whole entry (`tests::many_writers`).
#![forbid(unsafe_code)]

use std::ffi::{OsStr, OsString};
use std::io::{Read, Write};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::SystemTime;
use std::{env, fs, io};

use crate::backend::cuda::nvrtc::Compiled;
use crate::system;
use crate::thread::contain;

pub(super) use self::entry::CacheKey;
use self::entry::{decode, encode};

mod entry;

/// A PTX text has about 10 KB and a large cubin a few MB: thousands of kernels fit. CUDA's own cache had the same
/// limit before it was raised to 1 GiB.
const LIMIT_BYTES: u64 = 256 << 20;

/// Names the folder; if empty, there is no cache.
const VARIABLE: &str = "GPU_AWAIT_CACHE_DIR";

const EXTENSION: &str = ".compiled";

/// A folder of entries that only this user can write.
pub(super) struct DiskCache {
    folder: PathBuf,
    limit_bytes: u64,
}

impl DiskCache {
    /// The user's cache, if there is one. Creates the folder.
    pub(super) fn of_the_user() -> Option<DiskCache> {
        if !system::HAS_PRIVATE_FILES {
            return None;
        }
        DiskCache::open(folder(|name| env::var_os(name))?, LIMIT_BYTES)
    }

    fn open(folder: PathBuf, limit_bytes: u64) -> Option<DiskCache> {
        let look = || {
            if !folder.exists() {
                system::private_folder().create(&folder)?;
            }
            fs::metadata(&folder)
        };
        let reason = match look() {
            Ok(found) if !found.is_dir() => "it is no folder".to_owned(),
            Ok(found) if !system::is_ours_alone(&found) => {
                "another user owns it, or can write it: it would run on the GPU".to_owned()
            }
            Ok(_) => return Some(DiskCache { folder, limit_bytes }),
            Err(error) => error.to_string(),
        };
        let folder = folder.display();
        contain::log(|| {
            tracing::warn!(%folder, reason, "compiled CUDA C++ is not kept: set {VARIABLE}, or set it to nothing");
        });
        None
    }

    /// The compiled result for the key.
    pub(super) fn find(&self, key: &CacheKey) -> Option<Compiled> {
        let path = self.folder.join(file_name(key));
        let mut file = system::plain_file().open(path).ok()?;
        let found = file.metadata().ok()?;
        if !found.is_file() || !system::is_ours_alone(&found) || found.len() > self.limit_bytes {
            return None;
        }
        let mut entry = Vec::new();
        file.read_to_end(&mut entry).ok()?;
        let compiled = decode(&entry, key)?;
        // If this fails, the entry is evicted early.
        file.set_modified(SystemTime::now()).ok();
        Some(compiled)
    }

    /// Stores the compiled result for the key, if it can.
    pub(super) fn keep(&self, key: &CacheKey, compiled: &Compiled) {
        let entry = encode(key, compiled);
        if entry.len() as u64 > self.limit_bytes {
            return;
        }
        if let Err(error) = self.write(&file_name(key), &entry) {
            let folder = self.folder.display();
            contain::log(|| tracing::debug!(%folder, %error, "compiled CUDA C++ is not kept"));
        }
        self.trim();
    }

    fn write(&self, name: &str, entry: &[u8]) -> io::Result<()> {
        static WRITTEN: AtomicU64 = AtomicU64::new(0);
        let number = WRITTEN.fetch_add(1, Ordering::Relaxed);
        let new = self.folder.join(format!("{name}.{}.{number}", std::process::id()));
        let write = || {
            let mut file = system::private_file().open(&new)?;
            // Not synchronized: an entry truncated by a crash is a miss.
            file.write_all(entry)?;
            fs::rename(&new, self.folder.join(name))
        };
        let written = write();
        // An existing one is left over from a process with the same process id.
        if written.is_err() {
            fs::remove_file(&new).ok();
        }
        written
    }

    /// Removes the files used longest ago, until the rest is within the limit.
    fn trim(&self) {
        let Ok(entries) = fs::read_dir(&self.folder) else { return };
        let files = entries.flatten().filter(|entry| is_an_entrys(&entry.file_name()));
        let files = files.filter_map(|entry| Some((entry.metadata().ok()?, entry.path())));
        let mut files: Vec<_> = files.filter(|(found, _)| found.is_file()).collect();
        files.sort_by_key(|(found, _)| std::cmp::Reverse(found.modified().ok()));
        let mut total = 0;
        for (found, path) in files {
            total += found.len();
            if total > self.limit_bytes {
                fs::remove_file(path).ok();
            }
        }
    }
}

/// The user's cache folder, from environment variables.
fn folder(variable: impl Fn(&str) -> Option<OsString>) -> Option<PathBuf> {
    if let Some(named) = variable(VARIABLE) {
        return Some(PathBuf::from(named)).filter(|named| !named.as_os_str().is_empty());
    }
    // The XDG specification says to ignore relative paths.
    let absolute = |name| variable(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let caches = absolute("XDG_CACHE_HOME").or_else(|| Some(absolute("HOME")?.join(".cache")));
    Some(caches?.join("gpu-await"))
}

fn file_name(key: &CacheKey) -> String {
    format!("{:016x}{EXTENSION}", key.hash())
}

/// Whether it is the name of an entry, or of one being written.
fn is_an_entrys(name: &OsStr) -> bool {
    let Some((hash, rest)) = name.to_str().and_then(|name| name.split_at_checked(16)) else {
        return false;
    };
    let Some(rest) = rest.strip_prefix(EXTENSION) else { return false };
    let is_made_of = |text: &str, digits: &str| text.chars().all(|one| digits.contains(one));
    is_made_of(hash, "0123456789abcdef") && is_made_of(rest, "0123456789.")
}

#[cfg(all(test, unix))]
mod tests {
    use std::fs::File;
    use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
    use std::path::Path;
    use std::time::Duration;

    use super::*;

    /// A cache in the test's own folder, which is removed with it.
    struct Own(DiskCache);

    impl Own {
        fn new(limit_bytes: u64) -> Own {
            static MADE: AtomicU64 = AtomicU64::new(0);
            let number = MADE.fetch_add(1, Ordering::Relaxed);
            let name = format!("gpu-await-disk-cache-{}-{number}", std::process::id());
            Own(DiskCache::open(env::temp_dir().join(name).join("cache"), limit_bytes).unwrap())
        }

        fn path(&self, key: &CacheKey) -> PathBuf {
            self.0.folder.join(file_name(key))
        }

        fn files(&self) -> Vec<String> {
            let files = fs::read_dir(&self.0.folder).unwrap();
            let mut names: Vec<_> =
                files.map(|file| file.unwrap().file_name().into_string().unwrap()).collect();
            names.sort();
            names
        }

        /// The next compiled result replaces the entry.
        fn is_replaced(&self, key: &CacheKey) {
            assert!(self.0.find(key).is_none());
            self.0.keep(key, &compiled(100));
            assert_eq!(self.0.find(key), Some(compiled(100)));
            assert_eq!(self.files(), [file_name(key)]);
        }
    }

    impl Drop for Own {
        fn drop(&mut self) {
            fs::remove_dir_all(self.0.folder.parent().unwrap()).unwrap();
        }
    }

    fn key(name: &str) -> CacheKey {
        CacheKey::new([b"nvrtc 12.0".as_slice(), name.as_bytes()])
    }

    fn compiled(bytes: usize) -> Compiled {
        let names = vec![("f<int>".to_owned(), "_Z1fIiEvv".to_owned())];
        Compiled { image: vec![7; bytes], names, log: "a warning".to_owned() }
    }

    #[test]
    fn what_was_kept_is_found() {
        let own = Own::new(LIMIT_BYTES);
        let (a, b) = (key("a"), key("b"));
        assert!(own.0.find(&a).is_none());
        own.0.keep(&a, &compiled(10_000));
        let nothing = Compiled { image: Vec::new(), names: Vec::new(), log: String::new() };
        own.0.keep(&b, &nothing);
        // As another process would open it.
        let again = DiskCache::open(own.0.folder.clone(), LIMIT_BYTES).unwrap();
        assert_eq!(again.find(&a), Some(compiled(10_000)));
        assert_eq!(again.find(&b), Some(nothing));
        let mode = |path: &Path| fs::metadata(path).unwrap().mode() & 0o777;
        assert_eq!((mode(&own.0.folder), mode(&own.path(&a))), (0o700, 0o600));
    }

    #[test]
    fn whatever_is_in_its_place() {
        let own = Own::new(LIMIT_BYTES);
        let (a, b) = (key("a"), key("b"));
        for entry in [encode(&b, &compiled(20)), encode(&a, &compiled(20))[1..].to_vec()] {
            fs::write(own.path(&a), entry).unwrap();
            own.is_replaced(&a);
            fs::remove_file(own.path(&a)).unwrap();
        }
        let aside = own.0.folder.parent().unwrap().join("aside");
        fs::write(&aside, encode(&a, &compiled(20))).unwrap();
        symlink(&aside, own.path(&a)).unwrap();
        own.is_replaced(&a);
        assert!(aside.exists());
        fs::write(own.path(&a), b"").unwrap();
        own.is_replaced(&a);
        // An entry that cannot be replaced stays, and nothing new is left beside it.
        fs::remove_file(own.path(&a)).unwrap();
        fs::create_dir(own.path(&a)).unwrap();
        own.0.keep(&a, &compiled(20));
        assert!(own.0.find(&a).is_none());
        assert_eq!(own.files(), [file_name(&a)]);
    }

    #[test]
    fn what_others_can_write() {
        let own = Own::new(LIMIT_BYTES);
        let a = key("a");
        own.0.keep(&a, &compiled(20));
        let set = |path: &Path, mode| {
            fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
        };
        for mode in [0o620, 0o602, 0o666] {
            set(&own.path(&a), mode);
            own.is_replaced(&a);
        }
        for mode in [0o770, 0o702, 0o777] {
            set(&own.0.folder, mode);
            assert!(DiskCache::open(own.0.folder.clone(), LIMIT_BYTES).is_none());
        }
        set(&own.0.folder, 0o755);
        let again = DiskCache::open(own.0.folder.clone(), LIMIT_BYTES).unwrap();
        assert!(again.find(&a).is_some());
        // A file of another user; only root can make one.
        if system::effective_user() == 0 {
            std::os::unix::fs::chown(own.path(&a), Some(65_534), None).unwrap();
            own.is_replaced(&a);
            std::os::unix::fs::chown(&own.0.folder, Some(65_534), None).unwrap();
            assert!(DiskCache::open(own.0.folder.clone(), LIMIT_BYTES).is_none());
        }
    }

    #[test]
    fn a_folder_that_cannot_be_used() {
        let own = Own::new(LIMIT_BYTES);
        let parent = own.0.folder.parent().unwrap();
        fs::write(parent.join("file"), b"").unwrap();
        for folder in [parent.join("file"), parent.join("file/cache"), "/proc/none/cache".into()] {
            assert!(DiskCache::open(folder, LIMIT_BYTES).is_none());
        }
        // Removed during use.
        fs::remove_dir(&own.0.folder).unwrap();
        own.0.keep(&key("a"), &compiled(20));
        assert!(own.0.find(&key("a")).is_none());
    }

    #[test]
    fn the_limit() {
        let own = Own::new(3000);
        let foreign = ["notes", "0123456789abcdef", "0123456789abcdef.compiled.old"];
        for name in foreign {
            fs::write(own.0.folder.join(name), [0; 5000]).unwrap();
        }
        let keys = ["a", "b", "c", "d"].map(key);
        let now = SystemTime::now();
        let used = |key: &CacheKey, seconds_ago: u64| {
            let file = File::options().write(true).open(own.path(key)).unwrap();
            file.set_modified(now - Duration::from_secs(seconds_ago)).unwrap();
        };
        for (key, seconds_ago) in keys[..3].iter().zip([30, 20, 10]) {
            own.0.keep(key, &compiled(800));
            used(key, seconds_ago);
        }
        let there = || keys.each_ref().map(|key| own.path(key).exists());
        assert_eq!(there(), [true, true, true, false]);
        assert!(own.0.find(&keys[0]).is_some(), "used now");
        own.0.keep(&keys[3], &compiled(800));
        assert_eq!(there(), [true, false, true, true]);
        // The file of a process that died while writing is an entry like any other.
        let left = own.0.folder.join(format!("{}.17.0", file_name(&keys[1])));
        fs::write(&left, [0; 800]).unwrap();
        let file = File::options().write(true).open(&left).unwrap();
        file.set_modified(now - Duration::from_secs(100)).unwrap();
        own.0.keep(&keys[3], &compiled(801));
        assert!(!left.exists());
        assert_eq!(there(), [true, false, true, true]);
        // An entry above the limit is not kept, and evicts nothing.
        own.0.keep(&keys[1], &compiled(3000));
        assert_eq!(there(), [true, false, true, true]);
        assert!(foreign.iter().all(|name| own.0.folder.join(name).exists()));
    }

    #[test]
    fn many_writers() {
        let own = Own::new(LIMIT_BYTES);
        let a = key("a");
        std::thread::scope(|scope| {
            for writer in 0..4 {
                let (cache, a) = (&own.0, &a);
                scope.spawn(move || {
                    for round in 0..100 {
                        cache.keep(a, &compiled(1000 * writer + round));
                        let found = cache.find(a).unwrap();
                        assert!(found.image.iter().all(|byte| *byte == 7));
                    }
                });
            }
        });
        assert_eq!(own.files(), [file_name(&a)]);
    }

    #[test]
    fn the_users_folder() {
        let folder = |variables: &[(&str, &str)]| {
            let found = |name: &str| variables.iter().find(|(known, _)| *known == name);
            super::folder(|name| found(name).map(|(_, value)| value.into()))
        };
        let home = ("HOME", "/home/me");
        assert_eq!(folder(&[]), None);
        assert_eq!(folder(&[home]), Some("/home/me/.cache/gpu-await".into()));
        assert_eq!(folder(&[home, ("XDG_CACHE_HOME", "/var/c")]), Some("/var/c/gpu-await".into()));
        let relative = ("XDG_CACHE_HOME", "c");
        assert_eq!(folder(&[home, relative]), Some("/home/me/.cache/gpu-await".into()));
        assert_eq!(folder(&[home, (VARIABLE, "/x")]), Some("/x".into()));
        assert_eq!(folder(&[home, (VARIABLE, "")]), None);
    }
}
