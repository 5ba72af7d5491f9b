//! Compiles CUDA C++, or reuses an earlier result.
//!
//! | a source | is compiled |
//! |---|---|
//! | whose result depends on nothing else | once: a [`Cache`] per device in memory, a [`DiskCache`] for all processes |
//! | with the caller's options or include folders, or a word that reads a file or the clock | each time |
#![forbid(unsafe_code)]

use gpu_await_protocol::sync::Mutex;

use crate::backend::DeviceKind;
use crate::backend::cuda::nvrtc::{Compiled, Job, Nvrtc};
use crate::device::home::Home;
use crate::error::{Error, Result};
use crate::kernel::disk_cache::{CacheKey, DiskCache};
use crate::kernel::image::{Form, Image};
use crate::kernel::source::{CudaSource, no_cuda};
use crate::thread::contain;

impl CudaSource {
    /// Compiles it for a device, or returns the cached result. Blocks.
    pub(crate) fn image(&self, home: &Home) -> Result<Image> {
        if home.engine.backend.kind() == DeviceKind::Host {
            return Err(no_cuda(home));
        }
        let cache = home.get_or_load(|| Ok::<_, Error>(Cache::default()))?;
        if let Some(image) = cache.find(self) {
            return Ok(image);
        }
        let is_closed = self.is_closed();
        let nvrtc = Nvrtc::get()?;
        let architecture = match &self.architecture {
            Some(architecture) => architecture.clone(),
            None => {
                let (major, minor) = home.engine.limits.compute_capability;
                self.target(10 * major + minor, &nvrtc.architectures())
            }
        };
        let mut options = vec![format!("--gpu-architecture={architecture}")];
        options.extend_from_slice(&self.options);
        let CudaSource { text, name, headers, instances, cubin, .. } = self;
        let job = Job { text, name, headers, instances, options: &options, cubin: *cubin };
        let compiled = match is_closed {
            true => compile_once(nvrtc, &job),
            false => nvrtc.compile(&job),
        }?;
        if !compiled.log.is_empty() {
            contain::log(|| {
                tracing::warn!(file = name, log = compiled.log, "the compiler warns");
            });
        }
        let form = if *cubin { Form::Binary } else { Form::Ptx };
        let mut image = compiled.image;
        if form == Form::Ptx {
            // The compiler marks the end of the text.
            while image.pop_if(|last| *last == 0).is_some() {}
        }
        let image = Image::compiled(form, image.into());
        let image = image.named(name).with_instances(compiled.names);
        if is_closed {
            cache.keep(self, &image);
        }
        Ok(image)
    }

    /// Whether the compiled result depends on nothing outside the source.
    fn is_closed(&self) -> bool {
        let headers = self.headers.iter().flat_map(|(name, text)| [name, text]);
        let others = headers.chain(&self.instances).chain(&self.options);
        let mut texts = [&*self.text, &*self.name].into_iter().chain(others.map(String::as_str));
        !self.has_options && !texts.any(|text| looks_outside(text, &self.headers))
    }

    /// The architecture for a device. PTX for an older one works too; machine code does not.
    fn target(&self, device: u32, known: &[u32]) -> String {
        let older = known.iter().copied().filter(|known| *known <= device).max();
        match self.cubin {
            true => format!("sm_{device}"),
            false => format!("compute_{}", older.unwrap_or(device)),
        }
    }
}

/// Compiles, or returns the result from this machine's disk cache.
fn compile_once(nvrtc: &Nvrtc, job: &Job<'_>) -> Result<Compiled> {
    let (Some(version), Some(cache)) = (nvrtc.version(), DiskCache::of_the_user()) else {
        return nvrtc.compile(job);
    };
    let key = key(job, version);
    if let Some(compiled) = cache.find(&key) {
        contain::log(|| tracing::debug!(file = job.name, "taken from the disk cache"));
        return Ok(compiled);
    }
    let compiled = nvrtc.compile(job)?;
    cache.keep(&key, &compiled);
    Ok(compiled)
}

/// The key of a job in the disk cache.
fn key(job: &Job<'_>, version: (i32, i32)) -> CacheKey {
    let counts =
        [job.headers.len(), job.instances.len(), job.options.len()].map(usize::to_le_bytes);
    let head = [version.0, version.1, i32::from(job.cubin)].map(i32::to_le_bytes);
    let fixed = head
        .iter()
        .map(|field| field.as_slice())
        .chain(counts.iter().map(|field| field.as_slice()));
    let headers = job.headers.iter().flat_map(|(name, text)| [name, text]);
    let texts = headers.chain(job.instances).chain(job.options).map(String::as_bytes);
    CacheKey::new(fixed.chain([job.text.as_bytes(), job.name.as_bytes()]).chain(texts))
}

/// Whether compiling a text may read a file or the clock: whether it contains such a word, other than an `include` of one
/// of `headers`, which the compiler uses before any file.
fn looks_outside(text: &str, headers: &[(String, String)]) -> bool {
    const WORDS: &[&str] = &[
        "include",
        "include_next",
        "__has_include",
        "__has_include_next",
        "embed",
        "__has_embed",
        "__DATE__",
        "__TIME__",
        "__TIMESTAMP__",
    ];
    // The compiler joins lines before it splits them into words.
    let text = text.replace("\\\n", "").replace("\\\r\n", "");
    let is_a_header = |rest: &str| {
        let rest = rest.trim_start_matches([' ', '\t']);
        let name = match rest.as_bytes().first() {
            Some(b'"') => rest[1..].split_once('"'),
            Some(b'<') => rest[1..].split_once('>'),
            _ => None,
        };
        name.is_some_and(|(name, _)| headers.iter().any(|(known, _)| known == name))
    };
    let is_in_word = |one: char| one.is_alphanumeric() || one == '_';
    let mut rest = &*text;
    while let Some(start) = rest.find(is_in_word) {
        rest = &rest[start..];
        let (word, behind) = rest.split_at(rest.find(|one| !is_in_word(one)).unwrap_or(rest.len()));
        if WORDS.contains(&word) && !(word == "include" && is_a_header(behind)) {
            return true;
        }
        rest = behind;
    }
    false
}

/// A device's cache: the sources compiled last, most recently used first.
#[derive(Default)]
struct Cache(Mutex<Vec<(CudaSource, Image)>>);

impl Cache {
    const MOST: usize = 32;

    fn find(&self, source: &CudaSource) -> Option<Image> {
        let mut kept = self.0.lock();
        let at = kept.iter().position(|(known, _)| known == source)?;
        kept[..=at].rotate_right(1);
        Some(kept[0].1.clone())
    }

    fn keep(&self, source: &CudaSource, image: &Image) {
        let mut kept = self.0.lock();
        kept.retain(|(known, _)| known != source);
        kept.insert(0, (source.clone(), image.clone()));
        kept.truncate(Self::MOST);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_architecture_is_the_newest_that_device_and_compiler_both_know() {
        let known = [50, 60, 70, 80, 90];
        let ptx = CudaSource::new("");
        assert_eq!(ptx.target(90, &known), "compute_90");
        assert_eq!(ptx.target(89, &known), "compute_80");
        assert_eq!(ptx.target(120, &known), "compute_90");
        // Left for the compiler to refuse, with its own message.
        assert_eq!(ptx.target(35, &known), "compute_35");
        assert_eq!(ptx.target(75, &[]), "compute_75");
        assert_eq!(ptx.cubin().target(89, &known), "sm_89");
    }

    #[test]
    fn words_that_look_outside() {
        let headers = [("a.h".to_owned(), String::new()), ("b/c.h".to_owned(), String::new())];
        let looks_outside = |text| looks_outside(text, &headers);
        for inside in [
            "",
            "__global__ void f() {}",
            "#include \"a.h\"",
            "#  include\t<b/c.h> // it",
            "#inc\\\nlude \"a.h\"",
            "// including what includes(), my_include, include2",
            "%:include <a.h>",
            "#include \"a.\\\r\nh\"",
        ] {
            assert!(!looks_outside(inside), "{inside:?}");
        }
        for outside in [
            "#include \"d.h\"",
            "#include </usr/a.h>",
            "#include \"./a.h\"",
            "#inc\\\r\nlude \"d.h\"",
            "#include",
            "#define A \"a.h\"\n#include A",
            "#/**/include/**/\"a.h\"",
            "#include \"a.h\"\n#include <d.h>",
            "#include \"a.h",
            "#include_next \"a.h\"",
            "#if __has_include(\"a.h\")",
            "#embed \"a.h\"",
            "x = __TIME__;",
            "%:include \"d.h\"",
            "//include",
        ] {
            assert!(looks_outside(outside), "{outside:?}");
        }
    }

    #[test]
    fn what_is_closed() {
        let source =
            || CudaSource::new("#include \"a.h\"").header("a.h", "").define("A", "1").cubin();
        assert!(source().fast_math().line_info().max_registers(8).instance("f<int>").is_closed());
        for open in [
            source().option("-w"),
            source().include_dir("/usr/include"),
            source().header("b.h", "#include <c.h>"),
            source().header("b.h", "__DATE__"),
            source().define("B", "1\n#include <c.h>"),
            source().instance("f<__TIME__>"),
            CudaSource::new("#include \"a.h\""),
        ] {
            assert!(!open.is_closed(), "{open:?}");
        }
    }

    #[test]
    fn whatever_differs_is_another_key() {
        let options = |option: &str| vec!["--gpu-architecture=sm_90".to_owned(), option.to_owned()];
        let hash_of = |source: &CudaSource, option: &str, version| {
            let CudaSource { text, name, headers, instances, cubin, .. } = source;
            let options = &options(option);
            key(&Job { text, name, headers, instances, options, cubin: *cubin }, version)
        };
        let base = CudaSource::new("text").header("a", "b").instance("i");
        let mut keys = vec![
            hash_of(&base, "-o", (12, 0)),
            hash_of(&base, "-p", (12, 0)),
            hash_of(&base, "-o", (12, 1)),
            hash_of(&base, "-o", (13, 0)),
        ];
        for other in [
            base.clone().named("name"),
            base.clone().cubin(),
            base.clone().instance("j"),
            base.clone().header("c", "d"),
            CudaSource::new("texT").header("a", "b").instance("i"),
            CudaSource::new("text").header("a", "c").instance("i"),
            CudaSource::new("text").header("c", "b").instance("i"),
            // The same texts, in other places.
            CudaSource::new("text").instance("a").instance("b").instance("i"),
        ] {
            keys.push(hash_of(&other, "-o", (12, 0)));
        }
        for (at, a) in keys.iter().enumerate() {
            assert!(keys[..at].iter().all(|b| a != b), "key {at}");
        }
    }

    #[test]
    fn the_last_used_sources_are_kept_with_all_their_options() {
        let cache = Cache::default();
        let source = |number: usize| CudaSource::new(format!("// {number}"));
        let image = |number: usize| Image::ptx("").named(number.to_string());
        for number in 0..Cache::MOST {
            cache.keep(&source(number), &image(number));
        }
        assert!(cache.find(&source(0).fast_math()).is_none());
        assert!(cache.find(&source(0).cubin()).is_none());
        assert!(cache.find(&source(0).header("a.h", "")).is_none());
        let found = format!("{:?}", cache.find(&source(0)).unwrap());
        assert_eq!(found, format!("{:?}", image(0)));
        // 0 was used last, so 1 is evicted first.
        cache.keep(&source(100), &image(100));
        assert!(cache.find(&source(1)).is_none());
        assert!(cache.find(&source(0)).is_some() && cache.find(&source(100)).is_some());
        // Kept again, it takes no second slot.
        cache.keep(&source(100), &image(100));
        assert!(cache.find(&source(2)).is_some());
    }
}
