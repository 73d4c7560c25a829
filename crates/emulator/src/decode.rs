//! Statements into instructions: operands, and the constants and special registers they need.
//! The tables of opcodes are in `decode_arith` and `decode_memory`.

use std::collections::HashMap;

use crate::error::Error;
use crate::ir::{Addr, Class, Entry, Instr, LOCAL_WINDOW, Op, R, Reg, SHARED_BASE, Special, Ty};
use crate::lexer::{Kind, Token, number};
use crate::parse::{Name, Scopes};

#[derive(Clone, Debug)]
pub(crate) enum Operand {
    Reg(Reg),
    /// Negated predicate.
    Not(Reg),
    Imm(u64),
    /// Two destinations, `a|b`.
    Pair(Box<Operand>, Box<Operand>),
    Vector(Vec<Operand>),
    Address(Addr, bool),
    Label(u32),
    Sink,
}

/// Everything one statement says, modifiers consumed as they are understood.
pub(crate) struct Parts<'t> {
    pub(crate) name: &'t str,
    mods: Vec<&'t str>,
    pub(crate) operands: Vec<Operand>,
    pub(crate) line: u32,
    pub(crate) text: String,
}

impl<'t> Parts<'t> {
    pub(crate) fn take(&mut self, modifier: &str) -> bool {
        let found = self.mods.iter().position(|m| *m == modifier);
        found.map(|i| self.mods.remove(i)).is_some()
    }

    /// Consumes one of several modifiers and returns its index.
    pub(crate) fn one_of(&mut self, modifiers: &[&str]) -> Option<usize> {
        modifiers.iter().position(|m| self.take(m))
    }

    pub(crate) fn take_prefix(&mut self, prefix: &str) -> bool {
        let found = self.mods.iter().position(|m| m.starts_with(prefix));
        found.map(|i| self.mods.remove(i)).is_some()
    }

    pub(crate) fn has(&self, modifier: &str) -> bool {
        self.mods.contains(&modifier)
    }

    pub(crate) fn first(&mut self) -> Option<&'t str> {
        (!self.mods.is_empty()).then(|| self.mods.remove(0))
    }

    pub(crate) fn last(&mut self) -> Option<&'t str> {
        self.mods.pop()
    }

    pub(crate) fn unknown<T>(&self) -> Result<T, Error> {
        Err(Error::UnknownInstruction {
            line: self.line,
            text: self.text.clone(),
        })
    }

    pub(crate) fn done(&self) -> Result<(), Error> {
        if self.mods.is_empty() {
            Ok(())
        } else {
            self.unknown()
        }
    }

    /// The type modifier at the end; bit types count as unsigned.
    pub(crate) fn ty(&mut self) -> Result<Ty, Error> {
        match self.last().and_then(parse_ty) {
            Some(ty) => Ok(ty),
            None => self.unknown(),
        }
    }
}

pub(crate) fn parse_ty(name: &str) -> Option<Ty> {
    Some(match name {
        "u8" | "b8" => Ty::U8,
        "s8" => Ty::S8,
        "u16" | "b16" => Ty::U16,
        "s16" => Ty::S16,
        "u32" | "b32" => Ty::U32,
        "s32" => Ty::S32,
        "u64" | "b64" => Ty::U64,
        "s64" => Ty::S64,
        "f16" => Ty::F16,
        "bf16" => Ty::Bf16,
        "f32" => Ty::F32,
        "f64" => Ty::F64,
        _ => return None,
    })
}

pub(crate) struct Decoder<'a> {
    scopes: &'a Scopes<'a>,
    pub(crate) entry: Entry,
    pub(crate) scope: usize,
    constants: HashMap<(Class, u64), R>,
    specials: HashMap<(Class, Special), R>,
    sinks: [Option<R>; 3],
}

impl<'a> Decoder<'a> {
    pub(crate) fn new(scopes: &'a Scopes<'a>, entry: Entry) -> Self {
        Decoder {
            scopes,
            entry,
            scope: 0,
            constants: HashMap::new(),
            specials: HashMap::new(),
            sinks: [None; 3],
        }
    }

    pub(crate) fn finish(mut self) -> Entry {
        // Falling off the end is a return.
        let line = self.entry.code.last().map_or(0, |i| i.line);
        self.entry.code.push(Instr {
            guard: None,
            op: Op::Exit,
            line,
        });
        self.entry.text.push("ret".to_string());
        self.entry
    }

    pub(crate) fn statement(&mut self, scope: usize, tokens: &'a [Token]) -> Result<(), Error> {
        self.scope = scope;
        let line = tokens[0].line;
        let text = join(tokens);
        let mut at = 0;
        let mut guard = None;
        if tokens[0].is('@') {
            at += 1;
            let negate = tokens.get(at).is_some_and(|t| t.is('!'));
            at += usize::from(negate);
            let name = tokens.get(at).and_then(Token::word).unwrap_or("");
            match self.scopes.find(scope, name) {
                Some(Name::Reg(Reg {
                    class: Class::Pred,
                    index,
                })) => guard = Some((index, negate)),
                _ => {
                    return Err(Error::UnknownName {
                        line,
                        name: name.to_string(),
                    });
                }
            }
            at += 1;
        }
        let Some(opcode) = tokens.get(at).and_then(Token::word) else {
            return Err(Error::Syntax {
                line,
                text,
                expected: "an instruction",
            });
        };
        at += 1;
        let mut mods = opcode.split('.');
        let name = mods.next().unwrap_or("");
        let mut operands = Vec::new();
        while at < tokens.len() {
            operands.push(self.operand(tokens, &mut at, line)?);
            if at < tokens.len() {
                if !tokens[at].is(',') {
                    return Err(Error::Syntax {
                        line,
                        text,
                        expected: "`,` or `;`",
                    });
                }
                at += 1;
            }
        }
        let mut parts = Parts {
            name,
            mods: mods.collect(),
            operands,
            line,
            text,
        };
        let op = match self.arithmetic(&mut parts)? {
            Some(op) => op,
            None => match self.memory(&mut parts)? {
                Some(op) => op,
                None => return parts.unknown(),
            },
        };
        parts.done()?;
        self.entry.code.push(Instr { guard, op, line });
        self.entry.text.push(parts.text);
        Ok(())
    }

    fn operand(&mut self, tokens: &[Token], at: &mut usize, line: u32) -> Result<Operand, Error> {
        let first = self.simple(tokens, at, line)?;
        if tokens.get(*at).is_some_and(|t| t.is('|')) {
            *at += 1;
            let second = self.simple(tokens, at, line)?;
            return Ok(Operand::Pair(Box::new(first), Box::new(second)));
        }
        Ok(first)
    }

    fn simple(&mut self, tokens: &[Token], at: &mut usize, line: u32) -> Result<Operand, Error> {
        let syntax = |expected| Error::Syntax {
            line,
            text: join(tokens),
            expected,
        };
        let token = tokens.get(*at).ok_or(syntax("an operand"))?;
        *at += 1;
        match &token.kind {
            Kind::Punct('!') => match self.simple(tokens, at, line)? {
                Operand::Reg(reg) => Ok(Operand::Not(reg)),
                _ => Err(syntax("a predicate")),
            },
            Kind::Punct('-') => match self.simple(tokens, at, line)? {
                Operand::Imm(value) => Ok(Operand::Imm(value.wrapping_neg())),
                _ => Err(syntax("a number")),
            },
            Kind::Punct('{') => {
                let mut parts = Vec::new();
                while !tokens.get(*at).ok_or(syntax("`}`"))?.is('}') {
                    parts.push(self.simple(tokens, at, line)?);
                    if tokens.get(*at).is_some_and(|t| t.is(',')) {
                        *at += 1;
                    }
                }
                *at += 1;
                Ok(Operand::Vector(parts))
            }
            Kind::Punct('[') => {
                let (base, is_param) = match tokens
                    .get(*at)
                    .and_then(Token::word)
                    .map(|n| self.scopes.find(self.scope, n))
                {
                    Some(Some(Name::Param(offset))) => {
                        *at += 1;
                        (Operand::Imm(u64::from(offset)), true)
                    }
                    _ => (self.simple(tokens, at, line)?, false),
                };
                let mut offset = 0i64;
                while let Some(token) = tokens.get(*at).filter(|t| t.is('+') || t.is('-')) {
                    *at += usize::from(token.is('+'));
                    match self.simple(tokens, at, line)? {
                        Operand::Imm(value) => offset = offset.wrapping_add(value as i64),
                        _ => return Err(syntax("an offset")),
                    }
                }
                if !tokens.get(*at).is_some_and(|t| t.is(']')) {
                    return Err(syntax("`]`"));
                }
                *at += 1;
                let reg = match base {
                    Operand::Reg(reg) if reg.class != Class::Pred => reg,
                    Operand::Imm(value) => Reg {
                        class: Class::B64,
                        index: self.constant(Class::B64, value),
                    },
                    _ => return Err(syntax("an address")),
                };
                Ok(Operand::Address(Addr { reg, offset }, is_param))
            }
            Kind::Number(text) => number(text).map(Operand::Imm).ok_or(syntax("a number")),
            Kind::Word(name) if name == "_" => Ok(Operand::Sink),
            Kind::Word(name) => self.name(name, line),
            _ => Err(syntax("an operand")),
        }
    }

    fn name(&mut self, name: &str, line: u32) -> Result<Operand, Error> {
        Ok(match self.scopes.find(self.scope, name) {
            Some(Name::Reg(reg)) => Operand::Reg(reg),
            Some(Name::Label(target)) => Operand::Label(target),
            Some(Name::Shared(address)) => Operand::Imm(u64::from(address)),
            Some(Name::DynamicShared) => Operand::Imm(u64::from(dynamic_base(&self.entry))),
            Some(Name::Local(address) | Name::Param(address)) => Operand::Imm(u64::from(address)),
            Some(Name::Global(address)) => {
                self.entry.variables.push(address);
                Operand::Imm(address)
            }
            None => match special(name) {
                Some((special, Class::B64)) => Operand::Reg(self.special(special, Class::B64)),
                Some((special, _)) => Operand::Reg(self.special(special, Class::B32)),
                None if name == "WARP_SZ" => Operand::Imm(32),
                None => {
                    return Err(Error::UnknownName {
                        line,
                        name: name.to_string(),
                    });
                }
            },
        })
    }

    fn special(&mut self, special: Special, class: Class) -> Reg {
        let index = match self.specials.get(&(class, special)) {
            Some(index) => *index,
            None => {
                let index = self.fresh(class);
                self.specials.insert((class, special), index);
                self.entry.specials.push((Reg { class, index }, special));
                index
            }
        };
        Reg { class, index }
    }

    pub(crate) fn fresh(&mut self, class: Class) -> R {
        let index = self.entry.registers[class as usize];
        self.entry.registers[class as usize] += 1;
        index
    }

    pub(crate) fn constant(&mut self, class: Class, value: u64) -> R {
        let value = if class == Class::B32 {
            u64::from(value as u32)
        } else {
            value
        };
        if let Some(index) = self.constants.get(&(class, value)) {
            return *index;
        }
        let index = self.fresh(class);
        match class {
            Class::B32 => self.entry.constants32.push((index, value as u32)),
            Class::B64 => self.entry.constants64.push((index, value)),
            Class::Pred if value != 0 => self.entry.true_preds.push(index),
            Class::Pred => {}
        }
        self.constants.insert((class, value), index);
        index
    }

    /// A source of the given class; an immediate becomes a constant register.
    pub(crate) fn source(
        &mut self,
        parts: &Parts,
        operand: &Operand,
        class: Class,
    ) -> Result<R, Error> {
        match operand {
            Operand::Reg(reg) if reg.class == class => Ok(reg.index),
            Operand::Imm(value) => Ok(self.constant(class, *value)),
            _ => parts.unknown(),
        }
    }

    /// Source `n` of the given class.
    pub(crate) fn src(&mut self, parts: &Parts, n: usize, class: Class) -> Result<R, Error> {
        match parts.operands.get(n) {
            Some(operand) => self.source(parts, operand, class),
            None => parts.unknown(),
        }
    }

    /// Source `n` of whatever register class it has; immediates take the class given.
    pub(crate) fn any(&mut self, parts: &Parts, n: usize, class: Class) -> Result<Reg, Error> {
        match parts.operands.get(n) {
            Some(Operand::Reg(reg)) => Ok(*reg),
            Some(Operand::Imm(value)) => Ok(Reg {
                class,
                index: self.constant(class, *value),
            }),
            _ => parts.unknown(),
        }
    }

    /// A destination register; `_` goes to a register nobody reads.
    pub(crate) fn dest(
        &mut self,
        parts: &Parts,
        operand: Option<&Operand>,
        class: Class,
    ) -> Result<R, Error> {
        match operand {
            Some(Operand::Reg(reg)) if reg.class == class => Ok(reg.index),
            Some(Operand::Sink) => Ok(match self.sinks[class as usize] {
                Some(index) => index,
                None => {
                    let index = self.fresh(class);
                    self.sinks[class as usize] = Some(index);
                    index
                }
            }),
            _ => parts.unknown(),
        }
    }

    pub(crate) fn dst(&mut self, parts: &Parts, class: Class) -> Result<R, Error> {
        self.dest(parts, parts.operands.first(), class)
    }

    /// A predicate source, perhaps negated or constant.
    pub(crate) fn pred(&mut self, parts: &Parts, n: usize) -> Result<(R, bool), Error> {
        match parts.operands.get(n) {
            Some(Operand::Reg(reg)) if reg.class == Class::Pred => Ok((reg.index, false)),
            Some(Operand::Not(reg)) if reg.class == Class::Pred => Ok((reg.index, true)),
            Some(Operand::Imm(value)) => {
                Ok((self.constant(Class::Pred, u64::from(*value != 0)), false))
            }
            _ => parts.unknown(),
        }
    }

    pub(crate) fn expect(&self, parts: &Parts, count: usize) -> Result<(), Error> {
        if parts.operands.len() == count {
            Ok(())
        } else {
            parts.unknown()
        }
    }
}

/// Address of dynamic shared memory: after the static variables.
pub(crate) fn dynamic_base(entry: &Entry) -> u32 {
    (SHARED_BASE + entry.shared_bytes).next_multiple_of(1024)
}

fn join(tokens: &[Token]) -> String {
    let mut text = String::new();
    for (i, token) in tokens.iter().enumerate() {
        let tight =
            token.is(',') || token.is(']') || token.is('}') || token.is('|') || token.is('+');
        let after = i > 0
            && ['[', '{', '@', '!', '-', '|', '+']
                .iter()
                .any(|c| tokens[i - 1].is(*c));
        if i > 0 && !tight && !after {
            text.push(' ');
        }
        text.push_str(&token.text());
    }
    text
}

fn special(name: &str) -> Option<(Special, Class)> {
    let b32 = |special| Some((special, Class::B32));
    let (base, axis) = match name.rsplit_once('.') {
        Some((base, "x")) => (base, 0),
        Some((base, "y")) => (base, 1),
        Some((base, "z")) => (base, 2),
        Some(_) => return None,
        None => (name, 0),
    };
    match base {
        "%tid" => b32(Special::Tid(axis)),
        "%ntid" => b32(Special::Ntid(axis)),
        "%ctaid" => b32(Special::Ctaid(axis)),
        "%nctaid" => b32(Special::Nctaid(axis)),
        "%clusterid" => b32(Special::Clusterid(axis)),
        "%nclusterid" => b32(Special::Nclusterid(axis)),
        "%cluster_ctaid" => b32(Special::ClusterCtaid(axis)),
        "%cluster_nctaid" => b32(Special::ClusterNctaid(axis)),
        "%cluster_ctarank" => b32(Special::ClusterCtarank),
        "%cluster_nctarank" => b32(Special::ClusterNctarank),
        "%nsmid" => b32(Special::Nsmid),
        "%laneid" => b32(Special::Laneid),
        "%warpid" => b32(Special::Warpid),
        "%nwarpid" => b32(Special::Nwarpid),
        "%lanemask_eq" => b32(Special::LanemaskEq),
        "%lanemask_le" => b32(Special::LanemaskLe),
        "%lanemask_lt" => b32(Special::LanemaskLt),
        "%lanemask_ge" => b32(Special::LanemaskGe),
        "%lanemask_gt" => b32(Special::LanemaskGt),
        "%dynamic_smem_size" => b32(Special::DynamicSmemSize),
        "%total_smem_size" => b32(Special::TotalSmemSize),
        "%smid" => b32(Special::Zero),
        _ => None,
    }
}

/// The base that `cvta` of a space adds.
pub(crate) fn window(space: &str) -> Option<u64> {
    Some(match space {
        "shared" | "shared::cta" | "shared::cluster" => crate::ir::SHARED_WINDOW,
        "local" => LOCAL_WINDOW,
        "param" => crate::ir::PARAM_WINDOW,
        "global" | "const" => 0,
        _ => return None,
    })
}
