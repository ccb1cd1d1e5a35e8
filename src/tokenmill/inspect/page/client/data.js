// Where rows come from: `FileData` has what the page carries, `ServedData` requests it.
// Both return results to look through (`find`), whole rows (`row`), and rejected rows with their text.

async function decompressed(text) {
  const bytes = Uint8Array.from(atob(text), (one) => one.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(lenient.decode(await new Response(stream).arrayBuffer()));
}

// Bytes of tokens, and which are control tokens: by id, bytes in hex and 0 or 1.
class Pieces {
  constructor() {
    this.known = new Map();
    this.piece = (id) => (this.known.get(id) || [new Uint8Array(0)])[0];
    this.special = (id) => Boolean((this.known.get(id) || [])[1]);
  }

  add(table) {
    for (const [id, [bytes, special]] of Object.entries(table)) this.known.set(Number(id), [fromHex(bytes), special]);
    return this;
  }
}

// Of an order by a number, as `highest:reward`: the direction and the name, which may hold anything.
const numberOrder = (order) => {
  const found = /^(highest|lowest):([^]*)$/.exec(order);
  return found ? [found[1], found[2]] : [null, null];
};

// A condition of a query: text in the filter language of views, and the same for a row of the page.
const COMPARE = {
  ">=": (value, constant) => value !== null && value >= constant,
  "<=": (value, constant) => value !== null && value <= constant,
  "==": (value, constant) => value === constant,
  "not in": (value, constants) => !constants.includes(value),
};
const condition = (name, operator, constant, value) => ({
  text: `${name} ${operator} ${JSON.stringify(constant)}`,
  holds: (row) => COMPARE[operator](value(row), constant),
});

const trainedShare = (row) => (row.length ? row.trained / row.length : NaN);

class FileData {
  constructor(about, embedded) {
    this.overview = about.overview;
    this.selection = about.selection;
    this.compare = null;
    this.embedded = embedded;
  }

  async open() {
    const blocks = await Promise.all(this.embedded.blocks.map(decompressed));
    const pieces = new Pieces();
    for (const block of blocks) pieces.add(block.table);
    this.rows = blocks.flatMap((block) => block.rows).sort((a, b) => a.row - b.row);
    for (const row of this.rows) Object.assign(row, { piece: pieces.piece, special: pieces.special });
    this.byNumber = new Map(this.rows.map((row) => [row.row, row]));
  }

  async row(number) {
    return this.byNumber.get(number) || null;
  }

  async find(query, progress, cancelled) {
    let rows = this.rows.filter((row) => query.conditions.every((one) => one.holds(row)) &&
      (!query.role || row.turns.some(([role]) => role === query.role)));
    if (query.text) {
      const needle = query.text.toLowerCase();
      const having = [];
      for (let n = 0; n < rows.length; n++) {
        const row = rows[n];
        if (row.text === undefined) row.text = lenient.decode(joined(row.ids.map(row.piece))).toLowerCase();
        if (row.text.includes(needle)) having.push(row);
        if (n % 512 === 511) {
          progress(n / rows.length, having.length);
          await new Promise((resume) => setTimeout(resume));
          if (cancelled()) return null;
        }
      }
      rows = having;
    }
    const weights = {
      longest: (row) => -row.length,
      shortest: (row) => row.length,
      "least-trained": trainedShare,
      "most-trained": (row) => -trainedShare(row),
      drift: (row) => -CLASSES.indexOf(row.drift),
    };
    const [direction, name] = numberOrder(query.order);
    const sign = direction === "highest" ? -1 : 1;
    // Rows without the number come last in both directions.
    const byNumber = (row) => (row.numbers[name] === null ? Infinity : sign * row.numbers[name]);
    const weight = direction ? byNumber : weights[query.order];
    if (weight) rows.sort((a, b) => (weight(a) === weight(b) ? 0 : weight(a) - weight(b)));
    return {
      total: rows.length,
      searched: this.rows.length,
      of: this.rows.length,
      load: async (first, last) => rows.slice(first, last),
      place: async (number) => rows.indexOf(this.byNumber.get(number)),
    };
  }

  async rejected(first, size, reason) {
    const rows = this.overview.rejected.rows.filter((row) => !reason || row.reason === reason);
    return rows.slice(first, first + size);
  }

  async rejectedRaw(row) {
    return row.raw;
  }

  async picture(row, one) {
    this.pictures = this.pictures || decompressed(this.embedded.pictures);
    return (await this.pictures)[one.digest];
  }
}

class ServedData {
  constructor(about) {
    this.overview = about.overview;
    this.selection = about.selection;
    this.compare = about.compare;
    this.size = about.overview.totals.rows;
  }

  async open() {}

  async ask(name, given) {
    const url = new URL(`api/${name}`, document.baseURI);
    for (const [key, value] of Object.entries(given || {})) {
      if (value !== null && value !== undefined && value !== "") url.searchParams.set(key, value);
    }
    const answer = await fetch(url);
    const document_ = await answer.json();
    if (document_.error) throw new Error(document_.error.message);
    return document_;
  }

  async find(query) {
    const where = [...query.conditions.map((one) => one.text), ...(query.where ? [`(${query.where})`] : [])].join(" and ");
    const given = { where, role: query.role, changed: query.changed ? 1 : null, text: query.text, start: query.start || null, order: query.order };
    const first = await this.ask("rows", { ...given, first: 0, count: 60 });
    return {
      total: first.total,
      searched: first.searched,
      of: first.of,
      load: async (from, to) => {
        const rows = [];
        for (let at = from; at < to; at += 200) {
          const part = await this.ask("rows", { ...given, first: at, count: Math.min(200, to - at) });
          rows.push(...part.rows);
        }
        return rows;
      },
      place: async (number) => (await this.ask("place", { ...given, row: number })).place,
    };
  }

  withPieces(row) {
    const { piece, special } = new Pieces().add(row.table);
    return Object.assign(row, { piece, special });
  }

  async row(number) {
    if (number < 0 || number >= this.size) return null;
    return this.withPieces(await this.ask("row", { number }));
  }

  async picture(row, one) {
    if (row.theirs) return { note: "a picture of the other store" };
    return this.ask("picture", { number: row.row, picture: row.media.indexOf(one) });
  }

  raw(number) {
    return this.ask("raw", { number });
  }

  async rejected(first, size, reason) {
    return (await this.ask("rejected", { first, count: size, reason })).rows;
  }

  rejectedRaw(row) {
    return this.ask("rejected_raw", { number: row.number });
  }

  async compared(number) {
    const both = await this.ask("compared", { number });
    this.withPieces(both.ours);
    if (both.theirs) this.withPieces(both.theirs).theirs = true;
    return both;
  }

  survey() {
    return this.ask("survey");
  }
}
