"""In-context retrieval -> evalsets/tasks/retrieval.jsonl (multiple choice).

A passage is filler prose drawn from the hand-written stock below, with four
facts of one family planted in it for four invented people. Short and medium
passages are asked about three of them (at the depths 0.1, 0.5, 0.9; the fourth
stands at 0.3 or 0.7), long ones about all four (0.1, 0.3, 0.5, 0.9). The four
values are the choices in every row of a passage. So rows of one passage differ
only in the question (and share a cluster), and a bias towards some value cannot
help in all of them.

Every family has the same share of every length, so that lengths differ in
nothing but the filler. No filler sentence comes twice in the whole set, nor
does a full name.

Deterministic, standard library only.
Run from the parent of evalsets: python evalsets/generators/retrieval.py
"""

import itertools
import json
import random
import re
from pathlib import Path

SEED = 7301
OUT = Path(__file__).resolve().parent.parent / "tasks" / "retrieval.jsonl"

# size -> (passages a family, words of filler, depths asked). One word is about 1.3 tokens.
SIZES = {
    "short": (7, 52, (0.1, 0.5, 0.9)),
    "medium": (3, 272, (0.1, 0.5, 0.9)),
    "long": (2, 720, (0.1, 0.3, 0.5, 0.9)),
}
UNASKED = (0.3, 0.7)  # in turn, where only three are asked

# Filler, with [one|of|these] in places; all of a sentence's parts go together. A passage has at most one of each line.
STOCK = [
    "The market opened [a little|half an hour|much] later than usual because of the [rain|parade|strike].",
    "[Two|Three|Most] benches by the [canal|tennis courts|bus stop] had been [repaired|repainted] over the weekend.",
    "A cart full of [cabbages|hay|firewood] blocked the [lane|gateway|crossing] for nearly an hour.",
    "Nobody could say who had left the [gate|cellar|side door] [unlocked|wide open|off its hinges].",
    "The old clock above the [town hall|stables|arcade] still ran [seven|four|eleven] minutes [slow|fast].",
    "[Children|Students|Two boys] were chasing a [paper kite|hoop|balloon] along the [wall|embankment|beach].",
    "From the [bakery|kitchen|house opposite] came the smell of warm bread and [cinnamon|cardamom|melted butter].",
    "The last [ferry|steamer|coach] of the season carried only a handful of [passengers|walkers|musicians].",
    "A thin layer of [dust|flour|soot] covered every [shelf|desk|ledge] in the [reading room|storeroom].",
    "Somebody had stacked the [chairs|easels|deckchairs] in a [corner|corridor|shed] and forgotten about them.",
    "The road climbs slowly through the [orchards|pine woods|vineyards] before it reaches the [ridge|pass|village].",
    "[Letters|Parcels|Coupons] were sorted by hand on a long table near the [window|stove|entrance].",
    "It took [three|four|six] people to move the [wardrobe|harmonium|stuffed walrus] down the [narrow|winding] stairs.",
    "The committee met in the [back room|vestry|canteen] and argued about the [budget|statutes|new logo].",
    "Half of the seats in the [theatre|chapel|stadium] were still empty at [eight|nine|half past seven].",
    "[Swallows|Martins|Starlings] had built their nests under the roof of the [station|dairy|boathouse].",
    "The new [bridge|pavilion|town hall] was [wider|taller|cheaper] than the old one but far less pretty.",
    "Every autumn the [school|parish|scout troop] collects [chestnuts|acorns|windfalls] for the deer in the park.",
    "A notice on the [door|railing|stairs] asked visitors to [wipe their shoes|speak softly|shut the gate].",
    "The soup of the day was [leek and potato|cabbage|barley], as it had been [all week|since Monday].",
    "Most of the [fields|plots|terraces] had already been [ploughed|dug over|sown] when the frost came.",
    "The radio in the [workshop|garage|salon] played the same [song|advertisement|march] twice before noon.",
    "Along the [river|moat|canal] the willows leaned so [low|far out] that they touched the [water|boats].",
    "One of the [lamps|bulbs|neon signs] in the [corridor|foyer|underpass] flickered and then went out.",
    "The [museum|academy|monastery] keeps its oldest [maps|coins|gloves] in drawers lined with [felt|cork].",
    "A group of [tourists|engineers|pilgrims] stopped to photograph the [fountain|old crane|gatehouse].",
    "The [tailor|seamstress|wig maker] worked late that week to finish the [costumes|uniforms|last orders].",
    "There was a queue outside the [bank|clinic|stadium] even before it [opened|was light].",
    "The path behind the [mill|chapel|campsite] is [steep|muddy|treacherous] and slippery after a storm.",
    "Fresh [gravel|sand|tarmac] had been spread over the [car park|playground|drive].",
    "The [choir|brass band|quartet] practised in the cold [chapel|barn|gymnasium] with their coats on.",
    "Several [crates|sacks|barrels] of [apples|oats|plums] were waiting to be loaded.",
    "The [doctor's|vet's|notary's] waiting room had new [curtains|chairs|plants] and very old magazines.",
    "An argument about [parking|a hedge|the drains] went on for most of the [morning|evening|month].",
    "The [stream|well|waterfall] dries up in [July|June|dry years] and returns with the first storms.",
    "[Painters|Plasterers|Decorators] had covered the [floor|furniture|piano] with sheets of newspaper.",
    "The [hotel|hostel|inn] was full, so the late arrivals slept in the [annex|hayloft|billiard room].",
    "A [heron|stork|fisherman] stood without moving at the edge of the [pond|marsh|weir].",
    "The [inspector|archivist|surveyor] wrote everything down in tiny, [careful|slanting|crooked] letters.",
    "It was [quiet|still|calm] enough to hear the [ice creak|fish jump|oars dip] on the lake.",
    "The [carpenter|undertaker|piano mover] measured the [doorway|stairs|landing] twice and shook his head.",
    "[Ivy|Wisteria|Moss] had grown over the sign, so few people noticed the [shop|side street|warning].",
    "A delivery of [flour|paper|plaster] arrived [before sunrise|after closing time|a day early].",
    "The [tram|chapel|tea room] was crowded, and the windows were [fogged up|hard to open|streaming].",
    "On [clear|cold|windless] days the [islands|glaciers|power station] can be seen from the top of the hill.",
    "The village has two [bakers|bell ringers|mayors], and they have not spoken for [years|months|a decade].",
    "[Rain|Hail|Sleet] drummed on the tin roof of the [shed|chicken house|market].",
    "The [gardener|widow|curate] planted beans along the [fence|wall|drive] and onions by the path.",
    "Tickets for the [concert|cup final|masked ball] had sold out within [an hour|two days|minutes].",
    "A strip of [carpet|wallpaper|linoleum] had come loose on the [second|top|first] landing.",
    "The fishermen mended their nets while they waited for the [tide|bait|ice to melt].",
    "Some of the older [houses|farms|warehouses] still have thick [stone|clay|oak] walls.",
    "The [newspaper|weekly|gazette] printed a short [apology|obituary|riddle] on its back page.",
    "No one answered the telephone in the [office|surgery|tower] that [afternoon|Monday|evening].",
    "The [wind|crowd|runaway goat] had knocked over two of the [market stalls|beehives|road signs].",
    "A stray cat slept on the warm [bonnet|roof|seat] of the [van|taxi|tractor].",
    "The [shopkeeper|auctioneer|glassblower] wrapped each [cup|figurine|bottle] in a sheet of soft paper.",
    "They planned to [widen|heat|sweep] the pavement in front of the [pharmacy|consulate|nursery school].",
    "The lift was [out of order|full|being cleaned] again, so [everyone|the visitors|the cooks] took the stairs.",
    "At the edge of the [forest|moor|dunes] stood a hut with a [broken|crooked|smoking] chimney.",
    "The students carried their [drawings|posters|blueprints] home in [cardboard|plastic|metal] tubes.",
    "A faint [hum|knocking|hiss] came from the [machines|pipes|kilns] in the basement.",
    "The [mayor|landlord|coach] gave a short speech, and the [band|organ|jukebox] played afterwards.",
    "Many of the [tiles|pots|bricks] in the [courtyard|glasshouse|bath house] were cracked.",
    "The harvest was [good|poor|early] that year, though the [plums|hops|pumpkins] came late.",
    "An enormous map of the [coast|canals|moon] hung behind the [counter|bar|lectern].",
    "The night [train|bus|boat] was delayed by [snow|high water|fog] on the way.",
    "Some visitors preferred the quiet [rooms|tables|benches] at the back of the [house|garden|café].",
    "The potter set out her [bowls|jugs|tiles] to dry in the [sun|yard|draught].",
    "A row of [poplars|boulders|posts] marks the border between the two [farms|parishes|estates].",
    "The [cellar|crypt|boathouse] smelled of damp wood and [cider|tar|old rope].",
    "Volunteers cleaned the [beach|ditch|cemetery] on the first [Sunday|Saturday|Monday] of the month.",
    "The [staircase|alley|gangway] was so narrow that people had to [pass sideways|take turns|duck].",
    "Steam rose from the [pots|cauldrons|sinks] in the kitchen of the [canteen|barracks|convent].",
    "The [librarian|archivist|nun] mended torn [pages|maps|prints] with rice paper and glue.",
    "A long [crack|cable|garland] ran across the ceiling of the [hall|ticket office|nave].",
    "The [goats|cows|geese] wandered back to the [farm|barn|ford] on their own.",
    "There had been talk of a new [swimming pool|bypass|concert hall] for [ten|six|twenty] years.",
    "The [ice rink|ski lift|toboggan run] closes in [March|April], when the sun grows too strong.",
    "A boy with a [loud|hoarse|high] voice sold [programmes|peanuts|matches] at the entrance.",
    "The [archive|wine cellar|seed store] is kept at a steady temperature all year round.",
    "[Bicycles|Banners|Ladders] leaned against every [tree|lamp post|wall] in the square.",
    "The [postman|curate|milkman] stopped for a cup of [tea|cocoa|broth] at the corner house.",
    "Smoke from the [chimneys|bonfires|brickworks] hung low over the [valley|allotments|rooftops].",
    "The actors rehearsed the [final scene|sword fight|curtain call] again and again.",
    "A small plaque explained the [history|name|depth] of the [well|bastion|canal lock].",
    "The [wheat|nettles|maize] was so tall that the [path|fence|scarecrow] could hardly be seen.",
    "[Nets|Strings|Baskets] of [onions|garlic|dried mushrooms] hung from the beams of the barn.",
    "The [engineer|architect|captain] drew a quick sketch on the back of [a receipt|a menu|an envelope].",
    "By evening the [puddles|ruts|buckets] in the yard had turned to [ice|mud|slush].",
    "The florist threw away the [roses|tulips|wreaths] that had not been [sold|collected|watered].",
    "A flock of [geese|cranes|gulls] crossed the sky above the [reservoir|stadium|silo].",
    "The windows of the [factory|villa|casino] had been dark since [spring|the strike|New Year].",
    "It was the kind of [afternoon|town|holiday] when nothing much happens.",
    "The waiter brought more [bread|water|gravy] before anyone had [asked|sat down|noticed].",
    "Two [lorries|hay carts|coaches] met on the [bridge|pass|causeway], and neither would reverse.",
    "The view from the [tower|summit|top deck] was worth the [climb|fare|wait].",
    "A pile of wet [leaves|newspapers|straw] had blocked the [drain|path|chute].",
    "The violin maker let the wood rest for [several|five|at least seven] years.",
    "[Hikers|Riders|Delivery drivers] often lose their way where the [trail|road] splits near the [quarry|shrine|reservoir].",
    "The hall was decorated with [paper lanterns|old flags|sheaves of corn] and branches of [pine|holly|birch].",
    "A sudden gust blew the [hats|papers|umbrellas] off three [gentlemen|tables|café chairs].",
    "The bus driver knew most of the [passengers|dogs|schoolchildren] by [sight|name].",
    "Heavy [curtains|blinds|shutters] kept the [afternoon|early|harsh] light out of the studio.",
    "The beekeeper wore no [gloves|veil|boots] and never seemed to [be stung|hurry|mind].",
    "Somewhere down the [street|hall|hill] a [piano|church organ|harp] was being tuned.",
    "The ground was too [hard|stony|dry] for digging after so many [dry|hot|frosty] weeks.",
    "A tall fence had been put up around the [building site|crater|tennis club].",
    "The cook tasted the [sauce|broth|dumplings] and reached for the [pepper|salt|nutmeg].",
    "Mist covered the [meadow|racecourse|estuary] until the middle of the [morning|day].",
    "The guest book was full of polite [remarks|verses|lies] and [blots of ink|pressed flowers|tea stains].",
    "An old [rowing boat|raft|dredger] was slowly rotting beside the [jetty|sluice|reeds].",
    "The shop on the corner sells [rope|paraffin|string], [candles|brooms|soap] and little else.",
    "The teacher opened the windows to let [in some air|a wasp out|the chalk dust settle].",
    "Every house on the [hill|terrace|bay] has a [balcony|porch|veranda] that faces south.",
    "The [sheep|ponies|heifers] stood close together in the shade of the [hedge|viaduct|oaks].",
    "A [tap|gutter|radiator] dripped all night in the room [next door|above|below].",
    "The council promised to mend the [road|swings|dyke] before the [winter|elections|floods].",
    "Crowds gathered on the [quay|pier|cliffs] to watch the [ships leave|fireworks|seals].",
    "The cobbler kept his nails in [jars|tins|tubs] that had once held [jam|tobacco|mustard].",
    "There was a long silence after the last [note of the organ|verse|speech].",
    "A fallen [branch|wire|drainpipe] lay across the [tennis court|flower bed|cycle path].",
    "The [tea|coffee|punch] was too [hot|bitter|sweet] to drink and too weak to enjoy.",
    "The owner of the [inn|tea garden|guest house] counted the [spoons|towels|keys] each evening.",
    "Thunder rolled somewhere beyond the [hills|lake|refinery], but no rain [came|fell until dusk].",
    "The [stable|smithy|tannery] had been turned into a [gallery|theatre|school] for local artists.",
    "A wheel had come off the [handcart|pram|fire engine] in the middle of the [street|parade|bridge].",
    "The [swimming|fencing|cookery] lessons were moved to a different [afternoon|building|week].",
    "[Barrels|Tubs|Crates] of salted [herring|cod|butter] stood in rows along the harbour.",
    "The [judge|witness|speaker] asked for a glass of water before she [went on|sat down|began].",
    "[Lanterns|Flags|Garlands] were hung along the [jetty|canal|main street] for the [summer|lobster|kite] festival.",
    "The attic was full of [trunks|hatboxes|lampshades] that nobody had [opened|moved|wanted] for years.",
    "A [hedgehog|toad|tortoise] crossed the [lawn|car park|path] without any hurry.",
    "The printer ran out of [paper|ink|envelopes] just before the [deadline|election|weekend].",
    "Snow slid from the [roof|awning|firs] with a [heavy|dull|sudden] thud.",
    "The barber swept the [floor|step|pavement] and turned the sign in the [door|window].",
    "A narrow [canal|footpath|ditch] runs behind the [houses|gasworks|gardens] and down to the docks.",
    "Someone had drawn a [sun|moustache|heart] on the dusty window of the [bus|shop|hearse].",
    "The [jury|panel|board] could not agree, and the [hearing|prize-giving|vote] was put off.",
    "The best [mushrooms|bilberries|ferns] grow on the [shady|northern|steep] side of the slope.",
    "The roof of the [pavilion|bus station|gym] leaked in at least [four|three|seven] places.",
    "The grocer weighed the [nuts|raisins|lentils] on a pair of [brass|iron|kitchen] scales.",
    "A [cheerful|noisy|shivering] crowd was waiting for the [results|names|rules] to be read out.",
    "The puppet theatre comes to the [square|spa|fairground] every second [summer|Christmas|month].",
    "The lighthouse has been [empty|automatic|for sale] since its keeper [retired|married|moved inland].",
    "A basket of [clean laundry|kindling|eggs] stood at the foot of the [stairs|bed|ladder].",
    "The wood was stacked [neatly|to dry|shoulder high] under the [kitchen|end|bedroom] window.",
    "The translation took longer than the [publisher|widow|ministry] had [hoped|feared|paid for].",
    "Moss had crept over the [stones|graves|gargoyles] on the north side of the [church|tower|manor].",
    "The athletes warmed up on the [grass|sand|steps] beside the [track|pool|pitch].",
    "Early in the morning the [streets|arcades|squares] belong to the [pigeons|street sweepers|joggers].",
    "A [chain|barrier|fallen elm] across the drive kept the [cars|lorries|visitors] away.",
    "The glazier promised to come back with a [larger|thicker|cheaper] pane [on Monday|after lunch|soon].",
    "The [porridge|toast|rice] had burned, and everyone ate it [anyway|in silence].",
    "The [ticket|stamp|cigarette] machine refused every [coin|note|card] that was put into it.",
    "A broad avenue of [lime|plane|cedar] trees leads up to the [castle|asylum|racecourse].",
    "The tide was so low that people could [walk|wade|drive] out to the [wreck|island|sandbar].",
    "The apprentices were allowed to leave [early|at noon|first] before the [holiday|storm|inspection].",
    "The hinges of the [garden gate|trapdoor|hutch] squeaked whenever [it moved|the wind blew|someone passed].",
    "Only the [top|third|bottom] floor of the [building|hospital|warehouse] was still lit.",
    "[Flags|Barriers|Loudspeakers] had been put up along the main street for the [visit|marathon|procession].",
    "The caretaker shovelled a path from the [door|gym|chapel] to the [road|bins|bus stop].",
    "A cloud of [starlings|gnats|bats] turned above the [roofs|marsh|bandstand] at dusk.",
    "The surveyor packed up his [tripod|maps|flask] when the [light|battery|weather] began to fail.",
    "The [baker|cobbler|stationer] on the corner closed [early|at noon|for a week] because of the [heat|holiday|roadworks].",
    "[Two|Three|Several] boats were tied up [below the bridge|beside the lock|near the mill], waiting for [spare parts|better weather|the new owner].",
    "A [crate|box|sack] of [nails|candles|seed potatoes] had been left [by the back door|in the hallway|under the stairs].",
    "The [choir|orchestra|drama group] meets on [Tuesdays|Wednesdays|Fridays] in the [parish hall|old gymnasium|upper gallery].",
    "[Rain|Sleet|Hail] fell for most of the [morning|week|holiday], and the [football pitch|lower meadow|footpath] was flooded.",
    "The [carpets|curtains|chairs] in the [lounge|lobby|council chamber] were replaced [last spring|after the fire|before the election].",
    "Nobody [noticed|mentioned|remembered] that the [calendar|timetable|price list] on the wall was [a year old|out of date|upside down].",
    "The [caretaker|landlady|verger] keeps a [spare key|box of matches|list of numbers] in the [top drawer|desk|biscuit tin].",
    "[Pigeons|Sparrows|Jackdaws] nest in the [gutters|bell tower|ruined wing] and wake [the guests|the whole street|the students] at dawn.",
    "The [reservoir|fish pond|canal] froze over in [December|January|February], and [skaters|ducks|photographers] came from all around.",
    "A [retired teacher|young plumber|visiting professor] gave a talk about [beetles|medieval roofs|tidal power] to [nine listeners|an empty hall|a patient audience].",
    "The [ferry|cable car|funicular] runs every [twenty|thirty|forty] minutes, except [on Sundays|in strong wind|during the fair].",
    "[Dust|Pollen|Sawdust] had settled on the [piano|typewriter|spice jars], and no one [wiped it away|seemed to mind|said a word].",
    "The [first|second|third] floor smells of [varnish|floor polish|coffee] whenever the [heating|boiler|ventilation] comes on.",
    "They had painted the [railings|shutters|gate] in [spring|autumn|great haste], but the [salt|frost|damp] had already lifted the paint.",
    "A [van|lorry|handcart] loaded with [mattresses|roof tiles|old radios] was parked [across the entrance|outside the clinic|on the pavement].",
    "The [recipe|manual|leaflet] was printed in [tiny letters|three languages|fading ink] and folded [twice|the wrong way|like a fan].",
    "[Tourists|Schoolchildren|Pensioners] like to [rest|picnic|play cards] on the [steps|grass|low wall] behind the monument.",
    "The [mason|plasterer|roofer] arrived [late|with a cough|without his tools] and asked for [strong tea|the foreman|a longer ladder].",
    "Someone had [carved initials|stuck a poster|hung a wreath] on the [oak|bus shelter|cellar door] during the [night|festival|storm].",
    "The [cellar|loft|boathouse] was cleared [in an afternoon|by volunteers|with some regret], and the [rubbish|furniture|rope] was sold.",
    "In [April|October|November] the [hotel|campsite|tea garden] is [almost empty|half price|closed for repairs].",
    "The [trees|lamps|benches] along the [promenade|avenue|towpath] were a gift from [a local brewery|the rowing club|an anonymous widow].",
    "Both [sisters|brothers|cousins] complained about the [draught|noise|bill], but [quietly|only once|never together].",
    "The [auction|jumble sale|flower show] raised [enough|a little|surprisingly much] money for the [roof|playground|lifeboat].",
    "[Fog|Smoke|Drizzle] hid the [pier|chimneys|far shore] until [lunchtime|the wind turned|late in the day].",
    "A [radio|washing machine|drill] could be heard through the [ceiling|party wall|open window] all [evening|morning|weekend].",
    "The [mayor|headmistress|harbour master] opened the [exhibition|regatta|new crossing] with [a joke|a pair of scissors|a very long poem].",
    "The [soup|stew|pudding] was [thinner|sweeter|saltier] than usual, and [the cook|the guests|nobody] apologised for it.",
    "[Four|Five|Six] of the [windows|pews|panels] are original, and the rest were [copied|replaced|added] after the war.",
    "The [map|diagram|notice] beside the [turnstile|ticket desk|noticeboard] shows where [the toilets are|to leave umbrellas|the tours begin].",
    "A [gull|magpie|crow] had stolen [a sandwich|a spoon|a bread roll] from the [terrace|barge|kiosk].",
    "The [last|next|longest] meeting of the [allotment|chess|walking] society was spent on [the minutes|a broken lock|the Christmas party].",
    "Between the [villages|farms|lakes] the road is [narrow|unlit|badly patched], so [cyclists|drivers|walkers] take care.",
    "The [jeweller|bookbinder|watchmaker] works by the [north window|light of a lamp|stove] and [rarely|hardly ever|never] looks up.",
    "The [brochure|guidebook|poster] promised [sunshine|live music|free parking], which turned out to be [optimistic|true|a misprint].",
    "[Washing|Bunting|A string of lights] had been hung between the [balconies|masts|plum trees] for the [carnival|wedding|anniversary].",
    "The [museum|library|aquarium] stays open [late|until nine|all day] on the [first|last|third] Thursday of the month.",
    "An [elderly|impatient|enormous] man in [slippers|a raincoat|a straw hat] was feeding the [swans|pigeons|parking meter].",
    "The [clay|soil|sand] here is [heavy|pale|full of shells], and [cabbages|roses|only thistles] do well in it.",
    "The [builders|surveyors|electricians] found [old coins|a sealed passage|nothing but rubble] under the [floorboards|courtyard|altar].",
    "The [morning|afternoon|evening] was spent [sorting buttons|peeling potatoes|copying addresses], which [took longer|was duller|went faster] than expected.",
    "There is a [spring|stone cross|ruined kiln] in the woods that [few people|only foresters|older villagers] [visit|know about|can find].",
    "The [carriage|waiting room|corridor] was [stuffy|freezing|crowded], and the [heater|clock|loudspeaker] did not work.",
    "The [orchard|vineyard|nursery] above the [chapel|quarry|bend] has belonged to [one family|the monks|the parish] for centuries.",
    "A [letter|parcel|telegram] addressed to [nobody in particular|the former tenant|the manager] lay on the [mat|counter|piano stool].",
    "Every [window sill|shelf|table] in the [cottage|surgery|waiting area] held a [cactus|china figure|jar of pebbles].",
    "The [hens|geese|ducks] had got into the [churchyard|vegetable bed|lane] and [would not leave|caused a jam|made a dreadful noise].",
    "The [generator|pump|boiler] had been [humming|rattling|leaking] since [Monday|breakfast|the power cut].",
    "It was [widely known|often said|hardly a secret] that the [inn|sawmill|brickworks] had been losing [money|customers|staff] for years.",
    "The [plumber|tuner|locksmith] charged [a fair price|almost nothing|double], and left [muddy prints|a receipt|a funny smell] in the hall.",
    "The [tunnel|viaduct|embankment] took [six|eight|eleven] years to build and is now [closed|a footpath|hardly used].",
    "[Apples|Walnuts|Quinces] lay [rotting|in heaps|scattered] under the trees, and [wasps|blackbirds|children] came for them.",
    "A [scout|cyclist|postwoman] asked the way to the [youth hostel|mill|viewpoint] and was sent [uphill|back to the crossing|the wrong way].",
    "The [concert|lecture|film] began [an hour|some minutes|a little] late because the [projector|pianist|caretaker] could not be found.",
    "The [harbour|quay|slipway] is dredged every [spring|other year|few months], and the [mud|silt|gravel] is carried out to sea.",
    "She kept the [receipts|seed packets|theatre programmes] in a [shoebox|cigar case|drawer], [tied with string|in no order|sorted by year].",
    "He had been [repairing|cleaning|sanding] the same [chair|boat|accordion] since [August|the spring|his retirement].",
    "The [bell|siren|foghorn] could be heard [across the bay|in the next village|even indoors] when the wind [dropped|came from the west|was right].",
    "The [stalls|tents|barriers] were taken down [in silence|before midnight|by volunteers], and the [square|park|field] looked larger.",
    "Most [shops|cafes|offices] around here shut [at six|for lunch|on Mondays], to the [annoyance|surprise|amusement] of visitors.",
    "The [roof|porch|greenhouse] needs [new glass|a coat of tar|some attention], but the [budget|weather|owner] does not allow it.",
    "A [narrow|winding|cobbled] lane leads from the [church|market|brewery] to the [river|cemetery|tram depot].",
    "The [gardener|bailiff|groom] had a habit of [whistling hymns|talking to himself|slamming doors] when [it rained|guests arrived|work was short].",
    "[Half|Most|None] of the [lights|taps|locks] in the [annex|guest house|east wing] had been tested.",
    "The [stationmaster|conductor|guard] [blew|polished|dropped] his horn and [waved|sighed|checked his watch].",
    "[Thick|Faded|Velvet] curtains hung in the [dining room|box office|study] and kept out the [noise|draughts|sun].",
    "The [cheese|bread|honey] comes from a [farm|cooperative|monastery] on the [far|sunny|windy] side of the valley.",
    "A [puddle|pile of sand|stack of planks] in the [yard|driveway|alley] had been there since [the thaw|Easter|the last tenant].",
    "The [children|apprentices|trainees] were told to [wash their hands|count the boxes|stay off the ice] and [obeyed|grumbled|asked why].",
    "By [ten|eleven|noon] the [temperature|queue|water level] had risen [slightly|again|more than expected].",
    "The [cinema|ballroom|bowling alley] was turned into a [furniture shop|car park|gymnasium] in the [seventies|eighties|year of the flood].",
    "Across the [courtyard|valley|railway] a [saw|lawnmower|brass band] started up and [stopped again|ran all day|drowned out the birds].",
    "The [typist|treasurer|registrar] counted the [pages|votes|stamps] twice and got [different|identical|impossible] results.",
    "The [ponies|donkeys|oxen] are kept in the [paddock|lower barn|walled field] until the [snow melts|grass returns|fair begins].",
    "A [plank|ladder|signpost] had fallen into the [road|pond|hedge] and was [split|bent|charred] at one end.",
    "The [pharmacy|bank|post office] moved to a [smaller|brighter|cheaper] building opposite the [fire station|park gates|swimming baths].",
    "[Moths|Mice|Silverfish] had damaged the [flags|hymn books|costumes], though [damp|careless storage|summer heat] did worse.",
    "The [potatoes|parsnips|onions] were dug up [early|by hand|in one day] and stored in [straw|dry sand|paper bags].",
    "The [bench|shelter|drinking fountain] beside the [tennis courts|bandstand|lily pond] is dedicated to a [botanist|local poet|former warden].",
    "[Loose|Wet|Frozen] leaves made the [platform|ramp|steps] slippery, so [sand|salt|sawdust] was scattered.",
    "A [stamp collector|coin dealer|map seller] sets up his [folding table|stall|trays] beside the [fountain|arcade|cathedral] each weekend.",
    "The [porter|cleaner|usher] found an [umbrella|odd glove|opera glass] under the [radiator|back row|sofa].",
    "The [survey|census|inventory] took the [clerks|students|monks] [a fortnight|eleven days|most of the winter].",
    "[Fresh|Stale|Burnt] coffee was served from a [silver|dented|borrowed] pot in the [vestry|foyer|conservatory].",
    "The [ropes|sails|oars] were laid out to dry on the [lawn|shingle|jetty] after the [race|storm|season].",
    "A [gap|gate|stile] in the [hedge|wall|fence] lets [walkers|badgers|sheep] through to the common.",
    "The [pianist|organist|cellist] practised the same [passage|scale|waltz] until the [neighbours knocked|lights went out|tea was cold].",
    "The [lighthouse|signal box|water tower] was sold to [an architect|a painter|a family of six], who [rarely visits|repainted it|put in a sauna].",
    "The [tourist office|town archive|registry] hands out [free maps|long forms|pencils], but only to [residents|members|those who ask].",
    "An [unsigned|angry|unusually polite] letter about the [bins|church bells|bus stop] appeared in the [newspaper|parish magazine|shop window].",
    "The [floor|counter|pavement] had been [swept|scrubbed|washed down] before the [customers|inspectors|judges] arrived.",
    "The [peas|beans|marigolds] came up [early|unevenly|in a single night], to the delight of the [slugs|children|gardeners].",
    "[Coal|Firewood|Peat] is delivered on [Mondays|Thursdays|Saturdays] and tipped [into the cellar|beside the shed|at the kerb].",
    "The [gallery|studio|forge] at the end of the [mews|pier|terrace] shows [pottery|etchings|ironwork] by local makers.",
    "The [tailor|milliner|upholsterer] bought [ten|a dozen|sixty] yards of [linen|felt|striped cotton] and hoped for the best.",
    "On the [opposite|muddy|left] bank, [anglers|herons|campers] stood about in the [mist|reeds|drizzle].",
    "The [rehearsal|inspection|fire drill] was called off when the [conductor|captain|alarm] failed to [appear|wake up|start].",
    "A [goat|calf|piglet] was [born|weighed|sold] in the [barn|yard|hayloft] just before the vet drove up.",
    "The [trail|staircase|gangway] is roped off [in winter|after dark|during repairs], which [most people|joggers|teenagers] ignore.",
    "The [mill wheel|weathervane|sundial] was restored [at great cost|by a clockmaker|from old drawings] and unveiled in [May|June|September].",
    "[Steam|Laughter|Loud music] came from the [laundry|kitchen|assembly rooms] whenever the [door|hatch|skylight] opened.",
    "A [wedding party|group of hikers|school class] filled the [restaurant|ferry|upper deck] and [sang|ordered soup|fell asleep].",
    "The [editor|printer|proofreader] found [two|seven|nine] mistakes on the [cover|front page|final sheet].",
    "There were [crumbs|coins|ticket stubs] between the [cushions|floorboards|seats], left from [the matinee|last winter|some earlier owner].",
    "The [ice cream|chestnut|pancake] seller changed his [pitch|prices|bell] when the [fair|heatwave|new school term] began.",
    "The [hill|bluff|headland] is covered with [gorse|heather|bracken] and is [windy|deserted|lovely] in March.",
    "[Old|Empty|Broken] bottles stood [in rows|three deep|upside down] along the wall of the [shed|dairy|cider house].",
    "The [baron|abbot|merchant] who built the [manor|bridge|almshouse] is said to have died [poor|at sea|in debt].",
    "A [telephone|doorbell|smoke alarm] rang in the [empty|next|upstairs] flat, and [stopped|went on|was ignored].",
    "The [clerk|cashier|librarian] stamped the [form|card|ledger], [yawned|smiled briefly|blew on the ink] and called the next person.",
    "Repairs to the [sluice|pier|sea wall] will [begin|finish|resume] once the [tides|funds|divers] allow.",
    "The [barley|hay|flax] was cut [late|at dawn|in two days] and stacked [in the barn|along the ditch|under canvas].",
    "A [broken|borrowed|hired] bicycle leaned against the [chapel|pump|hen house], its [bell|basket|chain] missing.",
    "The [quarry|peat bog|salt works] closed [decades ago|without notice|after a strike], and [birches|swallows|climbers] have moved in.",
    "The [waitress|barman|innkeeper] lit the [stove|lanterns|candles] and turned the [sign|radio|chairs] round.",
    "[Seven|Nine|Ten] [students|soldiers|nuns] got off the [bus|tram|steamer] and asked for a cheap place to eat.",
    "The [ceiling|chimney|back wall] was [propped up|knocked down|inspected] on the advice of [an engineer|a neighbour|the insurers].",
    "The [cream|paint|glue] had [dried out|separated|gone hard] in its [pot|tin|jar] and was thrown away.",
    "A [draught|leak|faint smell of gas] was reported in the [basement|dormitory|workshop], but [the cause|the source|a reason] was never found.",
    "The [bakery|dairy|fishmonger] sends a [boy|van|trailer] round the [outlying|upper|coastal] hamlets twice a week.",
    "The [statue|obelisk|triumphal arch] on the [roundabout|square|embankment] is [cleaned|inspected|photographed] once a year.",
    "Each [cabin|booth|stall] has a [hook|shelf|small bench], a [curtain|lamp|number], and very little else.",
    "The [weir|ford|footbridge] is marked on [old|military|walking] maps, but [floods|farmers|time] swept it away.",
    "[Candles|Lamps|Flares] were lit along the [drive|shore|ramparts] to guide the [guests|boats|procession] in.",
    "The [bishop|ambassador|countess] stayed [one night|a week|for tea] and praised the [trout|gardens|silence].",
    "A [thrush|robin|blackbird] sang from the [gatepost|chimney|elm] long after the [bells|rain|mowers] had stopped.",
    "The [sledges|canoes|tents] can be hired from the [kiosk|warden|sports shop] at the foot of the [slope|dam|ski lift].",
    "The [quilt|tapestry|model ship] in the [hall|glass case|vestibule] took [one winter|three people|nearly a decade] to finish.",
    "The [cooks|gardeners|stagehands] ate [standing up|in shifts|on the stairs] because the [canteen|tables|back room] had been let.",
    "A [leaflet|banner|chalk drawing] advertised the [circus|lottery|harvest supper] to anyone who [walked|drove|cycled] past.",
    "The [hourglass|barometer|compass] on the [mantelpiece|desk|bridge] was [inherited|purely ornamental|never consulted].",
    "The [herbs|bulbs|saplings] were planted in [neat rows|old buckets|the wrong month] by a [class|neighbour|beginner].",
    "[Trams|Carts|Buses] once ran down the [middle|whole length|far side] of the [avenue|seafront|high street].",
    "The [attendant|warden|ranger] counted [cars|visitors|deer] with a [clicker|notebook|bag of pebbles].",
    "A [strip|bundle|roll] of [wire|canvas|oilcloth] had been pushed behind the [wardrobe|organ|water tank].",
    "The [tiles|bricks|slates] came by [barge|rail|mule] from a kiln [up the river|in the hills|beyond the border].",
]

FIRST = [
    "Mira", "Joren", "Talia", "Osric", "Velda", "Pascal", "Ines", "Corwin", "Lotte", "Bram",
    "Sanna", "Edric", "Nadia", "Hugo", "Farah", "Kester", "Ottilie", "Rafe", "Yusra", "Dorian",
    "Elka", "Matteo", "Greta", "Silas", "Anouk", "Tomas", "Wilma", "Idris", "Petra", "Lennart",
]
LAST = [
    "Holt", "Varga", "Pell", "Quist", "Marrow", "Denby", "Salter", "Brandt", "Okafor", "Finch",
    "Tully", "Reyes", "Norwood", "Kovac", "Ashby", "Lindt", "Carver", "Moreau", "Stroud", "Hale",
    "Ibsen", "Parrish", "Webb", "Castell", "Dunmore", "Yates", "Thorne", "Bexley", "Rask", "Osgood",
]

# family -> (planted sentence, question, values). The stem of the answer repeats the
# planted sentence up to its value. Values are disjoint from the words of the filler
# (checked below). But for locker and password, the four values of a passage have
# all tokens but the last in common in usual vocabularies (most are one token), so
# that a harness which scores such choices together needs one pass for all four;
# on a thousand tokens that counts.
FAMILIES = {
    "locker": (
        "The locker code of {name} is {value}.",
        "What is the locker code of {name}?",
        "digits4",
    ),
    "room": (
        "{name} works in room {value}.",
        "In which room does {name} work?",
        "corridor",
    ),
    "town": (
        "{name} was born in {value}.",
        "Where was {name} born?",
        ["Dublin", "Oslo", "Vienna", "Cairo", "Lisbon", "Athens", "Prague", "Warsaw", "Toronto", "Denver"],
    ),
    "coat": (
        "{name} came in a {value} coat.",
        "What colour was the coat of {name}?",
        ["red", "blue", "green", "yellow", "purple", "brown", "pink", "white", "black", "grey"],
    ),
    "bag": (
        "In the bag of {name} there was a {value}.",
        "What was in the bag of {name}?",
        ["torch", "camera", "hammer", "trumpet", "kettle", "mirror", "pillow", "whistle", "blanket", "needle"],
    ),
    "train": (
        "The train of {name} leaves from platform {value}.",
        "From which platform does the train of {name} leave?",
        "digit",
    ),
    "dog": (
        "{name} has a dog called {value}.",
        "What is the dog of {name} called?",
        ["Comet", "Bella", "Rocky", "Duke", "Ruby", "Rex", "Daisy", "Molly", "Ginger", "Shadow"],
    ),
    "job": (
        "{name} trained as a {value}.",
        "What did {name} train as?",
        ["pilot", "nurse", "lawyer", "chemist", "dancer", "dentist", "butcher", "sailor", "miner", "priest"],
    ),
    "password": (
        "The password chosen by {name} is {value}.",
        "Which password did {name} choose?",
        ["zorbin", "quenta", "mulvax", "trelph", "ganoli", "pexwood", "sindra", "hobrik", "yarlow", "fenupi"],
    ),
    "fruit": (
        "{name} ordered a crate of {value}.",
        "What did {name} order a crate of?",
        ["lemons", "olives", "cherries", "grapes", "peaches", "oranges", "pears", "bananas", "figs", "carrots"],
    ),
    "emblem": (
        "The club of {name} has a {value} on its flag.",
        "What is on the flag of the club of {name}?",
        ["wolf", "fox", "bear", "lion", "horse", "whale", "snake", "frog", "tiger", "rabbit"],
    ),
}


def values_for(rng, spec):
    if spec == "digits4":
        return [str(v) for v in rng.sample(range(1001, 9999), 4)]
    if spec == "corridor":  # four rooms next to each other
        first = 10 * rng.randrange(10, 99)
        return [str(first + v) for v in rng.sample(range(1, 10), 4)]
    if spec == "digit":
        return [str(v) for v in rng.sample(range(1, 10), 4)]
    return rng.sample(spec, 4)


def words(text):
    return len(text.split())


def variants(line):
    """All sentences that a line of the stock stands for."""
    parts = [part.split("|") for part in re.split(r"[\[\]]", line)]
    return ["".join(choice) for choice in itertools.product(*parts)]


class Filler:
    """Deals sentences, none twice, and uses all lines of the stock at about the same rate."""

    def __init__(self, rng):
        self.rng = rng
        self.left = [variants(line) for line in STOCK]
        self.used = [0] * len(STOCK)
        for sentences in self.left:
            rng.shuffle(sentences)

    def deal(self, budget):
        """Sentences from different lines, as close to the budget of words as they come."""
        order = [(n + 4 * self.rng.random(), i) for i, n in enumerate(self.used)]
        out, total = [], 0
        for _, i in sorted(order):
            if not self.left[i] or total + words(self.left[i][-1]) > budget + 4:
                continue
            out.append(self.left[i].pop())
            self.used[i] += 1
            total += words(out[-1])
            if total >= budget - 2:
                break
        else:
            raise ValueError("the filler has run out: write more, or ask for less")
        self.rng.shuffle(out)
        return out


def place(sentences, facts):
    """Insert each (depth, fact), in depth order, where its middle is nearest to depth."""
    total = sum(map(words, sentences)) + sum(words(f) for _, f in facts)
    result, pos, queue = [], 0, sorted(facts)
    for sentence in [*sentences, None]:
        while queue:
            depth, fact = queue[0]
            here = abs(pos + words(fact) / 2 - depth * total)
            step = words(sentence) if sentence else 0
            later = abs(pos + step + words(fact) / 2 - depth * total)
            if sentence is not None and later < here:
                break
            result.append(fact)
            pos += words(fact)
            queue.pop(0)
        if sentence is not None:
            result.append(sentence)
            pos += words(sentence)
    return result


def check_stock():
    sentences = [s for line in STOCK for s in variants(line)]
    assert len(sentences) == len(set(sentences))
    seen = {w for s in sentences for w in re.findall(r"[a-z]+", s.lower())}
    seen |= {w[:-1] for w in seen if w.endswith("s")} | {w + "s" for w in seen}
    for _, _, spec in FAMILIES.values():
        if isinstance(spec, list):
            clash = {v.lower() for v in spec} & seen
            assert not clash, clash
    assert not seen & {n.lower() for n in FIRST + LAST}
    assert not any(c.isdigit() for s in sentences for c in s)


def four_names(rng, taken):
    """Four people with no first or last name in common, and none of them met before."""
    while True:
        names = [f"{a} {b}" for a, b in zip(rng.sample(FIRST, 4), rng.sample(LAST, 4))]
        if not taken & set(names):
            taken.update(names)
            return names


def build():
    check_stock()
    rng = random.Random(SEED)
    filler = Filler(rng)
    taken = set()
    rows = []
    for size, (count, budget, asked) in SIZES.items():
        for k in range(count * len(FAMILIES)):
            family = list(FAMILIES)[k % len(FAMILIES)]
            plant, question, spec = FAMILIES[family]
            depths = asked if len(asked) == 4 else (*asked, UNASKED[k % 2])
            names = four_names(rng, taken)
            values = values_for(rng, spec)
            planted = [
                (depth, plant.format(name=name, value=value))
                for depth, name, value in zip(depths, names, values)
            ]
            sentences = place(filler.deal(budget), planted)
            passage = " ".join(sentences)
            choices = values[:]
            rng.shuffle(choices)
            for i, depth in enumerate(asked):
                stem = plant.split("{value}")[0].strip().format(name=names[i])
                found = passage.index(planted[i][1]) + len(planted[i][1]) / 2
                rows.append(
                    {
                        "id": f"retrieval-{size}-{k + 1:02d}-{depth}",
                        "slice": f"{size}-{depth}",
                        "cluster": f"retrieval-{size}-{k + 1:02d}",
                        "family": family,
                        "depth": round(found / len(passage), 3),
                        "context": f"{passage}\n\nQuestion: {question.format(name=names[i])}\nAnswer: {stem}",
                        "choices": choices,
                        "answer": choices.index(values[i]),
                    }
                )
    return rows


def main():
    rows = build()
    with OUT.open("w", encoding="utf-8", newline="\n") as f:
        for row in rows:
            f.write(json.dumps(row, ensure_ascii=False) + "\n")
    print(f"{OUT.name}: {len(rows)} rows")


if __name__ == "__main__":
    main()
