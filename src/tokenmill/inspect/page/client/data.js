// The data of the page: `FileData` reads it from the page, `ServedData` requests it from the server.
// Both return search results (`find`), whole rows (`row`), and rejected rows with their text.

async function decompressed(text) {
  const bytes = Uint8Array.from(atob(text), (one) => one.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(lenient.decode(await new Response(stream).arrayBuffer()));
}

// The bytes of tokens by id (in hex), and whether they are control tokens (0 or 1).
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

// Direction and name of an order by a number, such as `highest:reward`. The name may be any text.
const numberOrder = (order) => {
  const found = /^(highest|lowest):([^]*)$/.exec(order);
  return found ? [found[1], found[2]] : [null, null];
};

// A condition of a query: as text in the filter language of views, and as a function of a row.
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
      const matches = [];
      for (let n = 0; n < rows.length; n++) {
        const row = rows[n];
        if (row.text === undefined) row.text = lenient.decode(joined(row.ids.map(row.piece))).toLowerCase();
        if (row.text.includes(needle)) matches.push(row);
        if (n % 512 === 511) {
          progress(n / rows.length, matches.length);
          await new Promise((resume) => setTimeout(resume));
          if (cancelled()) return null;
        }
      }
      rows = matches;
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

  async image(row, one) {
    this.images = this.images || decompressed(this.embedded.images);
    return (await this.images)[one.digest];
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

  async request(name, params) {
    const url = new URL(`api/${name}`, document.baseURI);
    for (const [key, value] of Object.entries(params || {})) {
      if (value !== null && value !== undefined && value !== "") url.searchParams.set(key, value);
    }
    const response = await fetch(url);
    const result = await response.json();
    if (result.error) throw new Error(result.error.message);
    return result;
  }

  async find(query) {
    const where = [...query.conditions.map((one) => one.text), ...(query.where ? [`(${query.where})`] : [])].join(" and ");
    const params = { where, role: query.role, changed: query.changed ? 1 : null, text: query.text, start: query.start || null, order: query.order };
    const first = await this.request("rows", { ...params, first: 0, count: 60 });
    return {
      total: first.total,
      searched: first.searched,
      of: first.of,
      load: async (from, to) => {
        const rows = [];
        for (let at = from; at < to; at += 200) {
          const part = await this.request("rows", { ...params, first: at, count: Math.min(200, to - at) });
          rows.push(...part.rows);
        }
        return rows;
      },
      place: async (number) => (await this.request("place", { ...params, row: number })).place,
    };
  }

  withPieces(row) {
    const { piece, special } = new Pieces().add(row.table);
    return Object.assign(row, { piece, special });
  }

  async row(number) {
    if (number < 0 || number >= this.size) return null;
    return this.withPieces(await this.request("row", { number }));
  }

  async image(row, one) {
    if (row.theirs) return { note: "images of the other store are not shown" };
    return this.request("image", { number: row.row, image: row.media.indexOf(one) });
  }

  raw(number) {
    return this.request("raw", { number });
  }

  async rejected(first, size, reason) {
    return (await this.request("rejected", { first, count: size, reason })).rows;
  }

  rejectedRaw(row) {
    return this.request("rejected_raw", { number: row.number });
  }

  async compared(number) {
    const both = await this.request("compared", { number });
    this.withPieces(both.ours);
    if (both.theirs) this.withPieces(both.theirs).theirs = true;
    return both;
  }

  survey() {
    return this.request("survey");
  }
}
