//! Kernels in a sound version and a faulty one.

use kda_emulator::{Error, Memory, Options};

use super::{IN, OUT, Shape, kernel, launch, line_of, memory};

pub const SEEDS: u64 = 24;

pub const PROLOGUE: &str = "ld.param.u64 %d0, [p0];\nld.param.u64 %d1, [p1];\nmov.u32 %r0, %tid.x;\nmul.wide.u32 %d2, %r0, 4;\nadd.s64 %d3, %d0, %d2;\nadd.s64 %d4, %d1, %d2;";

pub struct Case {
    pub shape: Shape,
    pub directives: &'static str,
    pub body: String,
}

impl Case {
    pub fn new(shape: Shape, body: &str) -> Self {
        Case {
            shape,
            directives: "",
            body: format!("{PROLOGUE}\n{body}\nret;"),
        }
    }

    pub fn text(&self, from: &str, to: &str) -> String {
        assert!(self.body.contains(from), "`{from}` is not in the kernel");
        kernel(2, self.directives, &self.body.replace(from, to))
    }

    pub fn run(
        &self,
        text: &str,
        seed: u64,
        prepare: &dyn Fn(&mut Memory),
    ) -> (Result<(), Error>, Memory) {
        let mut memory = memory();
        prepare(&mut memory);
        let options = Options::default()
            .seed(seed)
            .max_instructions_per_thread(100_000);
        let result = launch(text, self.shape, &mut memory, &[OUT, IN], &options);
        (result.map(|_| ()), memory)
    }

    /// The body passes; with `from` replaced by `to` it fails as `check` says, on every seed.
    pub fn plant_with(
        &self,
        from: &str,
        to: &str,
        prepare: &dyn Fn(&mut Memory),
        check: &dyn Fn(&Error, &str) -> bool,
    ) {
        let (sound, faulty) = (self.text("ret;", "ret;"), self.text(from, to));
        let mut first: Option<Memory> = None;
        for seed in 0..SEEDS {
            let (result, memory) = self.run(&sound, seed, prepare);
            assert_eq!(result, Ok(()), "the sound version, seed {seed}");
            if let Some(first) = &first {
                assert!(
                    first.read("out") == memory.read("out"),
                    "the schedule changes the result, seed {seed}"
                );
            }
            first.get_or_insert(memory);
            let (result, _) = self.run(&faulty, seed, prepare);
            let error = result.expect_err("the faulty version passes");
            assert!(check(&error, &faulty), "seed {seed}: {error}\n{error:?}");
        }
    }

    pub fn plant(&self, from: &str, to: &str, check: &dyn Fn(&Error, &str) -> bool) {
        self.plant_with(from, to, &|_| {}, check);
    }
}

pub fn at(error: &Error, text: &str, part: &str) -> bool {
    error.line() == Some(line_of(text, part))
}

pub fn race_between(error: &Error, text: &str, a: &str, b: &str) -> bool {
    let Error::Race { site, earlier, .. } = error else {
        return false;
    };
    let (a, b) = (line_of(text, a), line_of(text, b));
    (site.line, earlier.line) == (a, b) || (site.line, earlier.line) == (b, a)
}
