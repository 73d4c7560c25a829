//! Module structure: directives, variables, entries, scopes, labels. Instructions go to `decode`.

use std::collections::HashMap;

use crate::decode::Decoder;
use crate::error::Error;
use crate::ir::{Class, Entry, MODULE_BASE, ParamDecl, Reg, SHARED_BASE, Variable};
use crate::lexer::{Kind, Token, number, tokens};

/// A parsed PTX module: immutable, shareable between threads, launched any number of times.
#[derive(Clone, Debug)]
pub struct Module {
    pub(crate) entries: Vec<Entry>,
    pub(crate) variables: Vec<Variable>,
    /// Whether the target has `griddepcontrol`, so that a launch may overlap its predecessor.
    pub(crate) dependent: bool,
}

/// What a launcher must know of a kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Signature {
    /// Size of each parameter, in bytes, in declaration order.
    pub parameter_bytes: Vec<usize>,
    /// Blocks of a cluster that the kernel itself requires.
    pub cluster: Option<[u32; 3]>,
}

impl Module {
    /// What a launcher must know of an entry; `None` when there is no such entry.
    pub fn signature(&self, entry: &str) -> Option<Signature> {
        let entry = self.entries.iter().find(|e| e.name == entry)?;
        Some(Signature {
            parameter_bytes: entry.params.iter().map(|p| p.size as usize).collect(),
            cluster: entry.required_cluster,
        })
    }

    /// Parses PTX text; whatever the emulator cannot execute is an error here, with its line.
    ///
    /// # Errors
    /// [`Error::Syntax`], [`Error::UnknownInstruction`] or [`Error::UnknownName`].
    pub fn parse(ptx: &str) -> Result<Module, Error> {
        let tokens = tokens(ptx)?;
        let mut parser = Parser {
            tokens: &tokens,
            at: 0,
            globals: Scope::default(),
            variables: Vec::new(),
            shared: SHARED_BASE,
        };
        let mut entries = Vec::new();
        let mut next = MODULE_BASE;
        while let Some(token) = parser.peek() {
            let line = token.line;
            match token.word() {
                Some(".visible" | ".weak" | ".extern" | ".common") => parser.at += 1,
                Some(".entry") => entries.push(parser.entry()?),
                Some(".global" | ".const") => {
                    let read_only = token.word() == Some(".const");
                    parser.at += 1;
                    let (name, mut bytes, size, align) = parser.variable()?;
                    bytes.resize(size as usize, 0);
                    next = next.next_multiple_of(u64::from(align.max(16)));
                    parser
                        .globals
                        .names
                        .insert(name.clone(), Name::Global(next));
                    parser.variables.push(Variable {
                        name,
                        address: next,
                        bytes,
                        read_only,
                    });
                    next += size + 256;
                }
                Some(".shared") => {
                    parser.at += 1;
                    let (name, _, size, align) = parser.variable()?;
                    let place = if size == 0 {
                        Name::DynamicShared
                    } else {
                        Name::Shared(parser.place_shared(size, align))
                    };
                    parser.globals.names.insert(name, place);
                }
                Some(".section") => parser.skip_section(),
                Some(".pragma") => parser.skip_statement(),
                _ => {
                    return Err(Error::Syntax {
                        line,
                        text: token.text(),
                        expected: "a directive",
                    });
                }
            }
        }
        Ok(Module {
            entries,
            variables: parser.variables,
            dependent: target(ptx).is_none_or(|t| t >= 90),
        })
    }

    /// Names of the entries, in the order of the text.
    pub fn entries(&self) -> Vec<&str> {
        self.entries.iter().map(|e| e.name.as_str()).collect()
    }
}

/// Number of the architecture in the `.target` line.
fn target(ptx: &str) -> Option<u32> {
    let rest = ptx.lines().find_map(|l| l.trim().strip_prefix(".target"))?;
    let digits = rest.trim().strip_prefix("sm_")?;
    let end = digits
        .find(|c: char| !c.is_ascii_digit())
        .unwrap_or(digits.len());
    digits[..end].parse().ok()
}

/// What a name stands for.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Name {
    Reg(Reg),
    Label(u32),
    Shared(u32),
    DynamicShared,
    Local(u32),
    Param(u32),
    Global(u64),
}

#[derive(Debug, Default)]
pub(crate) struct Scope {
    parent: Option<usize>,
    names: HashMap<String, Name>,
}

/// The scopes of one entry; the last resort is the module's.
pub(crate) struct Scopes<'a> {
    scopes: Vec<Scope>,
    globals: &'a Scope,
}

impl Scopes<'_> {
    pub(crate) fn find(&self, mut scope: usize, name: &str) -> Option<Name> {
        loop {
            if let Some(found) = self.scopes[scope].names.get(name) {
                return Some(*found);
            }
            match self.scopes[scope].parent {
                Some(parent) => scope = parent,
                None => return self.globals.names.get(name).copied(),
            }
        }
    }
}

struct Parser<'a> {
    tokens: &'a [Token],
    at: usize,
    globals: Scope,
    variables: Vec<Variable>,
    shared: u32,
}

struct Statement {
    scope: usize,
    start: usize,
    end: usize,
}

fn type_bytes(name: &str) -> Option<(Class, u32)> {
    Some(match name {
        ".pred" => (Class::Pred, 1),
        ".b8" | ".u8" | ".s8" => (Class::B32, 1),
        ".b16" | ".u16" | ".s16" | ".f16" | ".bf16" => (Class::B32, 2),
        ".b32" | ".u32" | ".s32" | ".f32" | ".f16x2" | ".bf16x2" => (Class::B32, 4),
        ".b64" | ".u64" | ".s64" | ".f64" => (Class::B64, 8),
        _ => return None,
    })
}

impl<'a> Parser<'a> {
    fn peek(&self) -> Option<&'a Token> {
        self.tokens.get(self.at)
    }

    fn next(&mut self, expected: &'static str) -> Result<&'a Token, Error> {
        let line = self.tokens.last().map_or(0, |t| t.line);
        let token = self.peek().ok_or(Error::Syntax {
            line,
            text: String::new(),
            expected,
        })?;
        self.at += 1;
        Ok(token)
    }

    fn fail<T>(&self, token: &Token, expected: &'static str) -> Result<T, Error> {
        Err(Error::Syntax {
            line: token.line,
            text: token.text(),
            expected,
        })
    }

    fn expect(&mut self, c: char, expected: &'static str) -> Result<(), Error> {
        let token = self.next(expected)?;
        if token.is(c) {
            Ok(())
        } else {
            self.fail(token, expected)
        }
    }

    fn eat(&mut self, c: char) -> bool {
        let found = self.peek().is_some_and(|t| t.is(c));
        self.at += usize::from(found);
        found
    }

    fn word(&mut self, expected: &'static str) -> Result<&'a str, Error> {
        let token = self.next(expected)?;
        match token.word() {
            Some(word) => Ok(word),
            None => self.fail(token, expected),
        }
    }

    fn number(&mut self) -> Result<u64, Error> {
        let negative = self.eat('-');
        let token = self.next("a number")?;
        if let Kind::Number(text) = &token.kind
            && let Some(value) = number(text)
        {
            return Ok(if negative {
                value.wrapping_neg()
            } else {
                value
            });
        }
        self.fail(token, "a number")
    }

    fn skip_statement(&mut self) {
        while let Some(token) = self.peek() {
            self.at += 1;
            if token.is(';') {
                break;
            }
        }
    }

    fn skip_section(&mut self) {
        let mut depth = 0;
        while let Some(token) = self.peek() {
            self.at += 1;
            if token.is('{') {
                depth += 1;
            } else if token.is('}') {
                depth -= 1;
                if depth == 0 {
                    break;
                }
            }
        }
    }

    fn place_shared(&mut self, size: u64, align: u32) -> u32 {
        self.shared = self.shared.next_multiple_of(align.max(1));
        let at = self.shared;
        self.shared += size as u32;
        at
    }

    /// The rest of `.space [.align n] .type name[n] [= init];`: name, bytes, size and alignment.
    fn variable(&mut self) -> Result<(String, Vec<u8>, u64, u32), Error> {
        let (mut align, mut element) = (0u32, 0u32);
        let name = loop {
            let word = self.word("a variable")?;
            match word {
                ".align" => align = self.number()? as u32,
                ".attribute" => {
                    while !self.eat(')') {
                        self.at += 1;
                    }
                }
                ".v2" | ".v4" | ".ptr" | ".volatile" => {}
                _ if word.starts_with('.') => match type_bytes(word) {
                    Some((_, bytes)) => element = bytes,
                    None => return self.fail(&self.tokens[self.at - 1], "a type"),
                },
                _ => break word.to_string(),
            }
        };
        let mut count = 1;
        while self.eat('[') {
            if !self.eat(']') {
                count *= self.number()?;
                self.expect(']', "`]`")?;
            } else {
                count = 0;
            }
        }
        let mut bytes = Vec::new();
        if self.eat('=') {
            let braces = self.eat('{');
            loop {
                let value = self.number()?;
                bytes.extend_from_slice(&value.to_le_bytes()[..element as usize]);
                if !self.eat(',') {
                    break;
                }
            }
            if braces {
                self.expect('}', "`}`")?;
            }
        }
        self.expect(';', "`;`")?;
        Ok((name, bytes, count * u64::from(element), align.max(element)))
    }

    fn params(&mut self, entry: &mut Entry, scope: &mut Scope) -> Result<(), Error> {
        self.expect('(', "`(`")?;
        let mut offset = 0u32;
        while !self.eat(')') {
            let (mut align, mut element) = (0u32, 0u32);
            let name = loop {
                let word = self.word("a parameter")?;
                match word {
                    ".param" | ".const" | ".global" | ".shared" | ".local" | ".ptr" => {}
                    ".align" => align = self.number()? as u32,
                    _ if word.starts_with('.') => match type_bytes(word) {
                        Some((_, bytes)) => element = bytes,
                        None => return self.fail(&self.tokens[self.at - 1], "a type"),
                    },
                    _ => break word.to_string(),
                }
            };
            let mut size = element;
            if self.eat('[') {
                size *= self.number()? as u32;
                self.expect(']', "`]`")?;
            }
            // A `.ptr .align` describes what the pointer points at.
            let align = if element == 8 { 8 } else { align.max(element) };
            offset = offset.next_multiple_of(align.max(1));
            scope.names.insert(name, Name::Param(offset));
            entry.params.push(ParamDecl { offset, size });
            offset += size;
            self.eat(',');
        }
        entry.param_bytes = offset;
        Ok(())
    }

    fn dimensions(&mut self) -> Result<[u32; 3], Error> {
        let mut dims = [1; 3];
        for dim in &mut dims {
            *dim = self.number()? as u32;
            if !self.eat(',') {
                break;
            }
        }
        Ok(dims)
    }

    fn entry(&mut self) -> Result<Entry, Error> {
        self.at += 1;
        let mut entry = Entry {
            name: self.word("an entry name")?.to_string(),
            ..Entry::default()
        };
        let mut root = Scope::default();
        if self.peek().is_some_and(|t| t.is('(')) {
            self.params(&mut entry, &mut root)?;
        }
        loop {
            let token = self.next("a kernel body")?;
            match token.word() {
                Some(".maxntid") => entry.largest_block = Some(self.dimensions()?),
                Some(".reqntid") => entry.required_block = Some(self.dimensions()?),
                Some(".reqnctapercluster") => entry.required_cluster = Some(self.dimensions()?),
                Some(".explicitcluster") => entry.explicit_cluster = true,
                Some(".minnctapersm" | ".maxnctapersm" | ".maxnreg" | ".maxclusterrank") => {
                    self.number()?;
                }
                Some(".pragma") => self.skip_statement(),
                _ if token.is('{') => break,
                _ => return self.fail(token, "a kernel directive or body"),
            }
        }
        self.body(entry, root)
    }

    /// First pass: scopes, declarations and statement bounds. Second pass: decoding.
    fn body(&mut self, mut entry: Entry, root: Scope) -> Result<Entry, Error> {
        let globals = std::mem::take(&mut self.globals);
        let module_shared = self.shared;
        let mut scopes = Scopes {
            scopes: vec![root],
            globals: &globals,
        };
        let mut statements: Vec<Statement> = Vec::new();
        let mut counts = [0u16; 3];
        let mut scope = 0;
        loop {
            let token = self.next("`}`")?;
            let colon = self.peek().is_some_and(|t| t.is(':'));
            if token.is('{') {
                scopes.scopes.push(Scope {
                    parent: Some(scope),
                    ..Scope::default()
                });
                scope = scopes.scopes.len() - 1;
            } else if token.is('}') {
                match scopes.scopes[scope].parent {
                    Some(parent) => scope = parent,
                    None => break,
                }
            } else if token.is(';') {
            } else if let (Some(name), true) = (token.word(), colon) {
                self.at += 1;
                let target = Name::Label(statements.len() as u32);
                scopes.scopes[scope].names.insert(name.to_string(), target);
            } else {
                let names = &mut scopes.scopes[scope].names;
                match token.word() {
                    Some(".reg") => self.registers(names, &mut counts)?,
                    Some(".shared") => {
                        let (name, _, size, align) = self.variable()?;
                        let place = if size == 0 {
                            Name::DynamicShared
                        } else {
                            Name::Shared(self.place_shared(size, align))
                        };
                        names.insert(name, place);
                    }
                    Some(".local") => {
                        let (name, _, size, align) = self.variable()?;
                        entry.local_bytes = entry.local_bytes.next_multiple_of(align.max(1));
                        names.insert(name, Name::Local(entry.local_bytes));
                        entry.local_bytes += size as u32;
                    }
                    Some(".pragma") => self.skip_statement(),
                    Some(".extern" | ".visible" | ".weak") => {}
                    Some(word) if word.starts_with('.') => {
                        return self.fail(token, "a declaration or an instruction");
                    }
                    _ => {
                        let start = self.at - 1;
                        self.skip_statement();
                        statements.push(Statement {
                            scope,
                            start,
                            end: self.at - 1,
                        });
                    }
                }
            }
        }
        // Dynamic shared memory follows every static variable.
        entry.shared_bytes = self.shared - SHARED_BASE;
        entry.registers = counts;
        let mut decoder = Decoder::new(&scopes, entry);
        for statement in &statements {
            let tokens = &self.tokens[statement.start..statement.end];
            decoder.statement(statement.scope, tokens)?;
        }
        let entry = decoder.finish();
        self.globals = globals;
        self.shared = module_shared;
        Ok(entry)
    }

    fn registers(
        &mut self,
        names: &mut HashMap<String, Name>,
        counts: &mut [u16; 3],
    ) -> Result<(), Error> {
        let word = self.word("a register type")?;
        let Some((class, _)) = type_bytes(word) else {
            return self.fail(
                &self.tokens[self.at - 1],
                "a register type of at most 64 bits",
            );
        };
        loop {
            let name = self.word("a register")?;
            let mut add = |name: String| {
                let index = counts[class as usize];
                counts[class as usize] += 1;
                names.insert(name, Name::Reg(Reg { class, index }));
            };
            if self.eat('<') {
                let count = self.number()?;
                self.expect('>', "`>`")?;
                (0..count).for_each(|i| add(format!("{name}{i}")));
            } else {
                add(name.to_string());
            }
            if !self.eat(',') {
                return self.expect(';', "`;`");
            }
        }
    }
}
